"""A process that a test controls line by line: one order, one answer."""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from tests.support.prepared_python import PreparedProcess
from tests.support.programs import own_environment

_STDERR = 2


class ControlledProcess:
    """Each order is a line on its stdin, a JSON array; each answer is a line on its stdout. It answers first when it is
    ready.
    """

    def __init__(
        self, module: str, arguments: Sequence[object], settings: Mapping[str, object], log: Path | None = None
    ) -> None:
        """settings: its `KVSIGHT_*` variables; those of the test run do not count. log: for stderr. None: that of the
        test run.
        """
        (orders, self._orders), (self._answers, answers) = _pipe(), _pipe()
        self._lock = threading.Lock()  # held from an order to its answer
        error = os.dup(_STDERR) if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with orders, answers:
                streams = orders.fileno(), answers.fileno(), error
                self._process = PreparedProcess(module, arguments, own_environment(**settings), streams)
        finally:
            os.close(error)
        self.greeting: Any = self._answer()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def order(self, command: str, *arguments: object) -> Any:
        """Send an order and return its answer. Any thread. Raises EOFError if the process has ended."""
        with self._lock:
            try:
                self._orders.write(json.dumps([command, *arguments]) + "\n")
                self._orders.flush()
            except BrokenPipeError as error:
                raise EOFError(f"{command}: the process has ended") from error
            return self._answer()

    def pause(self) -> None:
        """Send SIGSTOP: nothing happens until `resume`."""
        self._process.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._process.send(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM and wait for the end."""
        self._process.send(signal.SIGTERM)
        self._process.wait(30)

    def kill(self) -> None:
        """Send SIGKILL. Idempotent."""
        self._process.kill()

    def close_streams(self) -> None:
        """Release the pipes of a process that has ended."""
        self._orders.close()
        self._answers.close()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise EOFError("the process has ended")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.close_streams()


def set_wall_clock(ahead_s: float) -> None:
    """Inside such a process: set its wall clock, instead of that of the machine, which a test cannot set."""
    ahead_ns, right_ns = int(ahead_s * 1e9), time.time_ns
    time.time_ns = lambda: right_ns() + ahead_ns
    time.time = lambda: time.time_ns() / 1e9


def say(answer: object) -> None:
    """Inside such a process: answer."""
    print(json.dumps(answer), flush=True)


def _pipe() -> tuple[TextIO, TextIO]:
    """Return the reading and the writing end."""
    reader, writer = os.pipe()
    return os.fdopen(reader), os.fdopen(writer, "w")
