"""Runs modules as processes of their own that start in milliseconds, because they are forked from a prepared one.

Starting Python, numba and the kernels takes two seconds of CPU time, and the tests run some hundred commands. The
prepared process has imported what commands import, except for the commands themselves, and has loaded the kernels. It
has one thread, so that it can be forked. A forked process has its own environment, folder, streams and session, and
ends as any other one does.

Usage: `python -m tests.support.prepared_python SOCKET`, with the file descriptor of a Unix socket. Each request is a
JSON array `[MODULE, ARGUMENTS, ENVIRONMENT, FOLDER]` with four file descriptors: the standard streams, and a socket to
which the process id and, at the end, the exit code are written.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import termios
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from kv_events.kernels.load import load
from tests.support.programs import own_environment
from tests.support.stepped_clock import read_at_exec

_MODULES = (
    "aiokafka.admin",
    "analysis.explain.explanation",
    "api.app",
    "api.queries.kernels.parts",
    "api.server",
    "bridge",
    "engine_cache",
    "httpx",
    "indexer.assembly",
    "indexer.replay",
    "kv_events.hashing",
    "kvsight.client",
    "numpy.ma",
    "publisher.sinks.kafka",
    "pydantic.v1",
    "pythonjsonlogger.json",
    "rich.progress",
    "rich.table",
    "simulation.live",
    "typer",
    "uvloop",
)
_MAX_REQUEST_BYTES = 2**20
_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets at the end of its parent
_ROOT = Path(__file__).resolve().parents[2]


class PreparedProcess:
    """A process that runs `python -m MODULE`, in a session of its own. It ends with the test run at the latest."""

    def __init__(
        self, module: str, arguments: Sequence[object], environment: Mapping[str, str], streams: Sequence[int]
    ) -> None:
        """environment: the whole one. streams: descriptors for stdin, stdout and stderr."""
        request = json.dumps([module, [*map(str, arguments)], dict(environment), str(Path.cwd())]).encode()
        assert len(request) <= _MAX_REQUEST_BYTES
        self._events, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(_prepared(read_at_exec(environment)), [request], [*streams, theirs.fileno()])
        weakref.finalize(self, self._events.close)
        self.pid = int(self._events.recv(16))
        self._code: int | None = None

    @property
    def running(self) -> bool:
        """Return whether the process is alive."""
        with suppress(TimeoutError):
            self.wait(0)
        return self._code is None

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code, negative for a signal. Raises TimeoutError. Several threads may wait."""
        if self._code is None:
            ready = select.poll()
            ready.register(self._events, select.POLLIN)
            if not ready.poll(timeout_s and timeout_s * 1000):
                raise TimeoutError(f"process {self.pid} runs after {timeout_s} s")
            self._code = int(self._events.recv(16, socket.MSG_PEEK))  # left there for the other threads
        return self._code

    def send(self, number: int) -> None:
        """Send a signal to the whole session. Does nothing if it has just ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end. Idempotent."""
        if self.running:
            self.send(signal.SIGKILL)
            self.wait()


@lru_cache
def _prepared(variables: tuple[tuple[str, str], ...]) -> socket.socket:
    """Start a prepared process of this test process. Returns the socket for requests.

    variables: those of its environment that a fork would be too late for.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    plain = {"NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}  # see `commands.ENVIRONMENT`
    environment = own_environment(**plain, **dict(variables))
    process = subprocess.Popen(command, cwd=_ROOT, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class _Request(NamedTuple):
    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


def _main(requests: socket.socket) -> None:
    for module in _MODULES:
        import_module(module)
    load()
    gc.freeze()  # a forked process would copy what its garbage collector looks at
    request = _serve(requests)
    if request is not None:
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        sys.argv = [request.module, *request.arguments]
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _serve(requests: socket.socket) -> _Request | None:
    """Fork a process for each request. Returns the request in a forked process, and None once there are no more."""
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is not requests:
                    ready.unregister(key.fd)
                    pid, events = running.pop(key.fd)
                    os.close(key.fd)
                    _tell(events, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    events.close()
                    continue
                text, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 4)
                if not text:
                    return None
                *streams, last = descriptors
                events = socket.socket(fileno=last)
                pid = os.fork()
                if pid == 0:
                    _take_over(streams)
                    for handle, (_, others) in running.items():
                        os.close(handle)
                        others.close()
                    events.close()
                    requests.close()
                    return _Request(*json.loads(text))
                for stream in streams:
                    os.close(stream)
                _tell(events, pid)
                handle = os.pidfd_open(pid)
                running[handle] = pid, events
                ready.register(handle, selectors.EVENT_READ)


def _tell(events: socket.socket, number: int) -> None:
    with suppress(OSError):  # no test waits for it
        events.send(b"%d" % number)


def _take_over(streams: Sequence[int]) -> None:
    """In a forked process: use these standard streams, in a session of its own. A terminal sends it Ctrl-C."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
