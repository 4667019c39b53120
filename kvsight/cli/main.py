"""The `kvsight` command."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from kv_events.errors import KvsightError, os_error_text
from kv_events.runtime.variables import check_variables
from kvsight.cli import bridge, demo, query, register, route, serve, simulate, top
from kvsight.cli.app import App, print_versions
from kvsight.cli.doctor.command import doctor
from kvsight.cli.logs import audit, explain, files, record, replay, tail
from kvsight.cli.shared.console import EXIT_USAGE, UsageError, next_step
from kvsight.cli.shared.flags import Level, configure_logs
from kvsight.cli.shared.process import load_kernels
from kvsight.errors import KvsightConnectionError
from kvsight.extras import MissingExtraError

app = App(
    name="kvsight",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Tells an LLM router how much of a prompt's KV cache each worker holds, and on which tier.\n\n"
        "Start here: `kvsight demo` runs simulated engines, the index and the API.\n\n"
        "With your own engines: `kvsight serve --model MODEL --engine NAME=tcp://HOST:PORT` reads them and answers "
        "routers. At scale, engines publish to Kafka, and `kvsight serve --kafka HOST:PORT` reads it. "
        "`kvsight doctor` finds the part that does not work. "
        "`kvsight record` and `kvsight replay` show what the router saw at any moment, and `kvsight explain` tells why."
    ),
)
for command in (
    *(demo.demo, serve.serve, bridge.bridge, bridge.republish, route.endpoint_picker, route.route, register.register),
    *(register.unregister, doctor, query.query, top.top, tail.tail, record.record, replay.replay, explain.explain),
    *(audit.audit, simulate.simulate),
):
    app.command()(command)

logs = App(no_args_is_help=True, help="Look into event logs, check, cut, merge and export them.")
logs.command()(files.info)
logs.command("slice")(files.slice_log)
logs.command()(files.merge)
logs.command()(files.export)
app.add_typer(logs, name="log")


@app.command("compile-kernels", hidden=True)
def compile_all_kernels() -> None:
    """Compile all numba kernels into the cache. For container images."""
    from kv_events.kernels import load

    load_kernels(load.compile_missing)
    if not load.is_complete():
        raise UsageError("not all kernels are compiled and kept; a line above says why")


@app.callback(invoke_without_command=True)
def _settings(
    ctx: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log informational lines to stderr.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the versions and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    if version:
        print_versions(as_json)
    if ctx.invoked_subcommand is None or as_json:
        ctx.fail("--json needs --version" if as_json else "Missing command.")
    configure_logs(Level.INFO if verbose else Level.WARNING)
    check_variables()


def run() -> None:
    """Entry point. A user's mistake ends with one line on stderr and exit code 2."""
    sys.unraisablehook = _end_if_interrupted
    try:
        signal.signal(signal.SIGINT, _interrupt)
        app()
    except (KeyboardInterrupt, RuntimeError) as error:  # outside of a command, which handles its own
        # Python wraps an interrupt that hits the making of a class
        if not any(isinstance(each, KeyboardInterrupt) for each in (error, error.__cause__)):
            raise
        sys.exit(130)
    except MissingExtraError as error:
        _fail(str(error))
    except KvsightConnectionError as error:
        _fail(f"kvsight: {error}{next_step(error)}")
    except KvsightError as error:
        _fail(f"kvsight: {error}")
    except OSError as error:
        # for example a path in an option or a variable
        _fail(f"kvsight: {os_error_text(error)}")


def _fail(line: str) -> NoReturn:
    sys.stderr.write(f"{line}\n")
    sys.exit(EXIT_USAGE)


def _interrupt(*_: object) -> NoReturn:
    """End the command on Ctrl-C. A second Ctrl-C ends the process at once, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _end_if_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process if Ctrl-C came in a finalizer, which cannot raise: an import has such ones."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)  # `_interrupt` has restored its default
    sys.__unraisablehook__(unraisable)
