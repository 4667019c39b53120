"""The `kvsight` command."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from kv_events.errors import KvsightError
from kv_events.runtime.variables import check_variables
from kvsight.cli import (
    audit,
    bridge,
    demo,
    demo_prompt,
    diff,
    engine,
    explain,
    log,
    query,
    record,
    replay,
    serve,
    simulate,
    tail,
    top,
    topics,
    version,
    workers,
)
from kvsight.cli.app import App, Version
from kvsight.cli.console import EXIT_USAGE, compile_kernels
from kvsight.cli.doctor.command import doctor
from kvsight.cli.hash import hash_prompt
from kvsight.cli.logs import Level, configure_logs
from kvsight.extras import MissingExtraError, has_serve

app = App(
    name="kvsight",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Tells an LLM router how much of a prompt's KV cache each worker holds, and on which tier.\n\n"
        "Start here: `kvsight demo` runs simulated engines, the index and the API.\n\n"
        "In production, engines publish to Kafka and `kvsight serve --kafka HOST:PORT` answers routers. "
        "`kvsight doctor` finds the part that does not work. "
        "`kvsight record` and `kvsight replay` show what the router saw at any moment, and `kvsight explain` tells why."
    ),
)
app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("doctor")(doctor)
app.command("query")(query.query)
app.command("workers")(workers.workers)
app.command("top")(top.top)
app.command("tail")(tail.tail)
app.command("hash")(hash_prompt)
app.command("simulate")(simulate.simulate)
app.command("engine")(engine.engine)
app.command("demo-prompt")(demo_prompt.demo_prompt)
app.command("bridge")(bridge.bridge)
app.command("record")(record.record)
app.command("replay")(replay.replay)
app.command("explain")(explain.explain)
app.add_typer(log.app, name="log")
app.command("audit")(audit.audit)
app.add_typer(topics.app, name="topics")
app.command("diff")(diff.diff)
app.command("version")(version.version)


@app.command("compile-kernels", hidden=True)
def compile_all_kernels() -> None:
    """Compile all numba kernels into the cache. For container images."""
    of_logs = ("indexer.replay", "analysis.audit.audit", "analysis.explain.explanation")
    compile_kernels("publisher.own_blocks", "bridge", *of_logs, *(["api.app"] if has_serve() else []))


@app.callback()
def _settings(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log informational lines to stderr.")] = False,
    version: Version = False,
) -> None:
    configure_logs(Level.INFO if verbose else Level.WARNING)
    check_variables()


def run() -> None:
    """Entry point. A user's mistake ends with one line on stderr and exit code 2."""
    sys.unraisablehook = _end_if_interrupted
    try:
        signal.signal(signal.SIGINT, _interrupt)
        app()
    except KeyboardInterrupt:  # outside of a command, which handles its own
        sys.exit(130)
    except RuntimeError as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):  # Python wraps one that hits the making of a class
            raise
        sys.exit(130)
    except MissingExtraError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_USAGE)
    except KvsightError as error:
        sys.stderr.write(f"kvsight: {error}\n")
        sys.exit(EXIT_USAGE)
    except BrokenPipeError:
        # the reader of stdout has closed it (`| head`): write nothing more, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        # for example a path in an option or a variable
        where = f"{error.filename}: " if error.filename is not None else ""
        sys.stderr.write(f"kvsight: {where}{error.strerror or error}\n")
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
