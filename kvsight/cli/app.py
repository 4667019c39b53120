"""What all commands have: `-h`, `-v`, `--version`, names of the version before, and errors that name the typed flag."""

import os
import platform
import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from inspect import Parameter
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kv_events.errors import InvalidValueError, check_utf8
from kv_events.runtime.variables import variable
from kv_events.runtime.words import count
from kvsight.cli.shared.console import UsageError, print_result
from kvsight.cli.shared.flags import Level, configure_logs, parameters_of, set_parameters

MOVED = {
    "demo-prompt": "demo --prompt",
    "diff": "replay LOG --diff OTHER",
    "engine": "demo --engine NAME",
    "hash": "query --show-hashes",
    "log cat": "tail --log LOG --full",
    "log index": "replay LOG, which writes the key frames of a large log",
    "log verify": "log info --verify",
    "topics": "doctor --create-topics; and kvsight doctor, which checks them",
    "version": "--version",
    "workers": "top --ranks --once",
}
"""A command of the version before -> its new form. For one release."""
_SECRETS = ("api_token", "salt", "redis", "kafka_token_command")
"""Parameters that no message shows."""
_OR_FILES = ("text", "tokens")
"""Parameters that name a file after `@`. It may have a name of any bytes."""


class Group(TyperGroup):
    """A group of commands. One that has moved is an error that names its new form."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        words = cmd_name if ctx.parent is None else f"{ctx.info_name} {cmd_name}"
        if found is None and words in MOVED:
            raise UsageError(f"`kvsight {words}` is now: kvsight {MOVED[words]}")
        return found

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # the reader of stdout has closed it (`| head`): write nothing more, not even at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit from None


class App(typer.Typer):
    """A Typer application whose commands all have the common options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # type: ignore[override]
        """Register a command, as `typer.Typer.command` does."""
        register = super().command(name, cls=Command, **options)
        return lambda function: register(_with_common_options(function))


class Command(TyperCommand):
    """A command whose errors name what the user set: a flag, or a variable."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            context = super().make_context(*args, **options)
        except typer.BadParameter as error:
            raise _invalid_value(error) or error from error
        for parameter in self.params:
            value = context.params.get(parameter.name)
            if isinstance(value, str) and not (parameter.name in _OR_FILES and value.startswith("@")):
                hidden = parameter.name in _SECRETS
                check_utf8(_name(context, parameter), value, count(len(value), "character") if hidden else None)
        return context

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InvalidValueError as error:
            name = _name_of_field(ctx, error.field)
            if name is None:
                raise
            raise InvalidValueError(name, error.value, error.expected) from error


def _invalid_value(error: typer.BadParameter) -> InvalidValueError | None:
    """The same error as of any other setting, or None if a value is missing or is no single value."""
    from pydantic import ValidationError

    if not isinstance(error.__cause__, ValidationError) or error.param is None or error.ctx is None:
        return None
    found = error.__cause__.errors()[0]
    return InvalidValueError(_name(error.ctx, error.param), found["input"], _expected(found["msg"], error.param))


def _name(ctx: Any, parameter: Any) -> str:
    """How the user set a parameter: its variable, else its flag."""
    source = ctx.get_parameter_source(parameter.name or "")
    is_variable = source is not None and source.name == "ENVIRONMENT"
    return str(parameter.envvar if is_variable else max(parameter.opts, key=len))


def _expected(message: str, parameter: Any) -> str:
    """What a message of pydantic or Typer demands of the value of a parameter."""
    choices = message.partition(" is not ")[2]
    if choices:
        return choices.rstrip(".")
    demanded = message.removeprefix("Input should be ").partition(",")[0]
    if not demanded.startswith(("greater", "less")):
        return demanded
    least, most = (getattr(parameter, bound, None) for bound in ("min", "max"))
    return f"a number {demanded}" if least is None or most is None else f"a number in {least} .. {most}"


def _name_of_field(ctx: Any, field: str) -> str | None:
    """What the user set a field with. field: its name, or that of its variable, and what is in it."""
    field, *within = field.split(": ", 1)
    field = "api_token" if field == "token" else field  # an argument of the client
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name)
        is_set = source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
        if is_set and field in (parameter.name, variable(parameter.name)):
            return ": ".join([_name(ctx, parameter), *within])
    return None


def _with_common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-v` and `--version`, whose callbacks do all the work, to the parameters of a command."""

    @wraps(function)
    def command(*, verbose: bool, version: bool, **options: Any) -> Any:
        return function(**options)

    common = {"verbose": Verbose, "version": Version}
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind) for name, kind in common.items()]
    return set_parameters(command, [*parameters_of(function), *added])


def print_versions(as_json: bool = False) -> None:
    """Print the versions of kvsight and its dependencies, and end."""
    versions = {
        "kvsight": installed("kvsight"),
        "python": platform.python_version(),
        **{package: _installed(package) for package in ("numba", "numpy", "aiokafka", "fastapi")},
    }
    print_result(versions, (f"{name:8} {value}" for name, value in versions.items()), as_json=as_json)
    raise typer.Exit


def _installed(package: str) -> str:
    try:
        return installed(package)
    except PackageNotFoundError:
        return "not installed"


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Log informational lines to stderr.",
        callback=lambda wanted: configure_logs(Level.INFO) if wanted else None,
    ),
]
Version = Annotated[
    bool,
    typer.Option(
        "--version",
        help="Print the versions and exit.",
        callback=lambda wanted: print_versions() if wanted else None,
        is_eager=True,
    ),
]
