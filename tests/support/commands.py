"""The `kvsight` command: in this process, as a process until it ends or beside a test, and as a service of a log."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner, Result

from kvsight.cli.main import app
from tests.support.http_checks import succeeds
from tests.support.prepared_python import PreparedProcess
from tests.support.servers.child_process import free_port
from tests.support.waiting import wait_until

KVSIGHT = [sys.executable, "-m", "kvsight"]
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("KVSIGHT_") and name not in ("COLUMNS", "TERM")
} | {"TERM": "dumb", "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}
"""No settings of the developer, and no colours.

Where colorama is installed, as for MkDocs, numba starts it, and it writes `ESC[0m` at the end of a process.
"""


def invoke(*words: object, stdin: str = "") -> Result:
    """Run a command in this process, with pipes of 80 columns. An error of kvsight is its `exception`."""
    return CliRunner().invoke(app, list(map(str, words)), input=stdin, env={"COLUMNS": "80"})


def printed(*words: object, code: int = 0, stdin: str = "") -> Any:
    """The JSON that a command prints in this process."""
    done = invoke(*words, "--json", stdin=stdin)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@contextmanager
def local_zone(name: str) -> Iterator[None]:
    """Let this process be in a time zone."""
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TZ", name)
            time.tzset()
            yield
    finally:
        time.tzset()


def kvsight(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with pipes until it ends. environment: further variables. Raises TimeoutError."""
    with RunningCommand(*arguments, **(environment or {})) as command:
        code = command.end()
    return subprocess.CompletedProcess(["kvsight", *map(str, arguments)], code, command.out, command.err)


class RunningCommand:
    """`with RunningCommand("tail", ...) as command:` runs a command beside a test, with pipes, until the block ends."""

    def __init__(self, *words: object, **variables: object) -> None:
        """variables: further ones of its environment."""
        self._out, self._err = os.memfd_create("out"), os.memfd_create("err")
        for descriptor in (self._out, self._err):
            weakref.finalize(self, os.close, descriptor)
        environment = ENVIRONMENT | {name: str(value) for name, value in variables.items()}
        with Path(os.devnull).open() as nothing:
            streams = nothing.fileno(), self._out, self._err
            self._process = PreparedProcess("kvsight", words, environment, streams)

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return _written(self._out)

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return _written(self._err)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.running

    def wait_for(self, text: str, deadline_s: float = 60) -> None:
        """Return once it has written a text to stdout or stderr."""
        wait_until(lambda: self.has_written(text), deadline_s, f"{text!r} from the command")

    def has_written(self, text: str) -> bool:
        """Return whether it has written a text to stdout or stderr. Raises AssertionError if it has ended without."""
        is_running = self.running
        found = text in self.out or text in self.err
        assert found or is_running, self.err
        return found

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send(number)

    def end(self, *signals: int) -> int:
        """Send signals, and return the exit code once it has ended."""
        for number in signals:
            self._process.send(number)
        return self._process.wait(100)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()


def _written(descriptor: int) -> str:
    """All of a file to which another process writes."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()


@contextmanager
def served_log(log: Path, *flags: object, interrupts: int = 1) -> Iterator[str]:
    """Run `kvsight serve` with a log whose workers never expire. Ctrl-C ends it without a traceback."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    settings = {"KVSIGHT_WORKER_TTL_S": "1000000000000", "KVSIGHT_FORGET_AFTER_S": "1000000000000"}
    with RunningCommand("serve", "--port", port, "--event-log-dir", log, *flags, **settings) as service:
        service.wait_for("kvsight listens on")
        wait_until(lambda: succeeds(f"{url}/ready"), deadline_s=100, what="kvsight serve to be ready")
        yield url
        code = service.end(*[signal.SIGINT] * interrupts)
        assert "Traceback" not in service.err
        assert code in ((0, 130) if interrupts == 1 else (130, -signal.SIGINT)), service.err
