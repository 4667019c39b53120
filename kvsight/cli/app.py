"""What all commands have in common: `-h`, `-v`, `--version`, and errors that name the flag that was typed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kv_events.errors import InvalidValueError
from kv_events.runtime.variables import variable
from kvsight.cli.logs import Level, configure_logs


class App(typer.Typer):
    """A Typer application whose commands all have the common options."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # type: ignore[override]
        """Register a command, as `typer.Typer.command` does."""
        register = super().command(name, cls=Command, **options)
        return lambda function: register(_with_common_options(function))


class Command(TyperCommand):
    """A command whose errors name the flag that was typed, not the variable that could have been set instead."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().make_context(*args, **options)
        except typer.BadParameter as error:
            raise _invalid_value(error) or error from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InvalidValueError as error:
            flag = _typed_flag(ctx, error.field)
            if flag is None:
                raise
            raise InvalidValueError(flag, error.value, error.expected) from error


def _invalid_value(error: typer.BadParameter) -> InvalidValueError | None:
    """The same error as of any other setting, or None if a value is missing or is no single value."""
    from pydantic import ValidationError

    if not isinstance(error.__cause__, ValidationError) or error.param is None or error.ctx is None:
        return None
    found = error.__cause__.errors()[0]
    source = error.ctx.get_parameter_source(error.param.name or "")
    is_variable = source is not None and source.name == "ENVIRONMENT"
    name = error.param.envvar if is_variable else max(error.param.opts, key=len)
    return InvalidValueError(str(name), found["input"], _expected(found["msg"]))


def _expected(message: str) -> str:
    """What a message of pydantic or Typer demands of a value."""
    choices = message.partition(" is not ")[2]
    if choices:
        return choices.rstrip(".")
    demanded = message.removeprefix("Input should be ").partition(",")[0]
    return f"a number {demanded}" if demanded.startswith(("greater", "less")) else demanded


def _typed_flag(ctx: Any, field: str) -> str | None:
    """The flag on the command line that set a field. field: its name, or that of its variable."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name)
        if field in (parameter.name, variable(parameter.name)) and source is not None and source.name == "COMMANDLINE":
            return str(max(parameter.opts, key=len))
    return None


def print_version(wanted: bool) -> None:
    """Print the version and end, if `--version` is given."""
    if wanted:
        typer.echo(f"kvsight {version('kvsight')}")
        raise typer.Exit


def log_more(wanted: bool) -> None:
    """Log informational lines, if `-v` is given."""
    if wanted:
        configure_logs(Level.INFO)


Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log informational lines to stderr.", callback=log_more)]
Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
]


def _with_common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-v` and `--version`, whose callbacks do all the work, to the parameters of a command."""

    @wraps(function)
    def command(*args: Any, verbose: bool, version: bool, **options: Any) -> Any:
        return function(*args, **options)

    common = {"verbose": Verbose, "version": Version}
    own = inspect.signature(function, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in common.items()
    ]
    command.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in own.parameters.items()} | common
    return command
