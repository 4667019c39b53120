"""Server processes for tests. They use free ports, write their output to a file, and end with the test run."""

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.waiting import wait_until

# The shell becomes the server. A background process of the shell waits for the end of a pipe whose other end only this
# process holds. The pipe ends at the latest when this process ends, for any reason, and the group is then killed.
_TIED_TO_US = 'exec 3<&0; (cat <&3 >/dev/null; kill -9 -$$) 2>/dev/null & exec 3<&-; exec "$@" </dev/null'

# These ports are below the range that Linux uses for outgoing connections. A client that retries a port in that range
# while its server is down may connect to itself, and the server could then not restart.
_PORTS = range(18_000, 32_000)
_CLAIMS = os.open(Path(tempfile.gettempdir()) / f"kvsight-ports-{os.getuid()}", os.O_CREAT | os.O_RDWR, 0o600)
"""A file of which a process locks one byte for each port that it has chosen, because the port is used only later."""
_given = deque[int](maxlen=len(_PORTS) // 2)
"""Ports that this process has chosen. Its own locks do not keep it from choosing them again."""


class PartMissingError(Exception):
    """A server or package that a test needs is not installed. The message says how to install it."""

    def __init__(self, part: str, remedy: str) -> None:
        super().__init__(part, remedy)

    def __str__(self) -> str:
        part, remedy = self.args
        return f"{part} is missing: {remedy}"


class ChildProcess:
    """One server process in a process group of its own."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _TIED_TO_US, "sh", *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Return whether the server process is alive."""
        return self._process.poll() is None

    def wait_for_port(self, port: int, deadline_s: float) -> None:
        """Return once the server accepts connections. Raises RuntimeError with the end of its output."""
        give_up = time.monotonic() + deadline_s
        while not _accepts(port):
            if not self.running or time.monotonic() > give_up:
                state = "is silent" if self.running else f"ended with {self._process.returncode}"
                self.kill()
                raise RuntimeError(f"server on port {port} {state} after {deadline_s:g} s:\n{self._log_tail()}")
            time.sleep(0.02)

    def send(self, number: int) -> None:
        """Send a signal to the whole group."""
        os.killpg(self._process.pid, number)

    def is_stopped(self) -> bool:
        """Return whether all threads of the server stand still, after SIGSTOP."""
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        try:
            states = [thread.read_text().rpartition(")")[2].split()[0] for thread in threads]
        except OSError:  # a thread has just ended
            return False
        return set(states) == {"T"}

    def kill(self) -> None:
        """Send SIGKILL to the whole group and wait for the server to end. Idempotent."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return  # the id may now belong to another group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


class RestartableServer:
    """A server that a test may kill, hold up and restart."""

    process: ChildProcess | None = None

    @property
    def running(self) -> bool:
        """Return whether the server's process is alive."""
        return self.process is not None and self.process.running

    def start(self, command: Sequence[str | Path], log: Path, *ports: int, deadline_s: float = 60.0) -> None:
        """Start or restart, and block until all ports accept connections."""
        self.kill()
        self.process = ChildProcess(command, log)
        for port in ports:
            self.process.wait_for_port(port, deadline_s)

    def kill(self) -> None:
        """Send SIGKILL, without a shutdown."""
        if self.process is not None:
            self.process.kill()

    def restart(self) -> None:
        """Start or restart, and block until the server can be used."""
        raise NotImplementedError

    def close(self) -> None:
        """End everything."""
        self.kill()

    def __enter__(self) -> Self:
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until it has effect: the server then accepts connections and never answers."""
        assert self.process is not None
        self.process.send(signal.SIGSTOP)
        wait_until(self.process.is_stopped, what="all threads to stand still")

    def resume(self) -> None:
        """Send SIGCONT."""
        assert self.process is not None
        self.process.send(signal.SIGCONT)


def has_ipv6() -> bool:
    """Return whether this machine can bind to the IPv6 loopback address."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def free_port() -> int:
    """Return a free port of the loopback address, which no other process of the tests gets while this one runs.

    This one does not get it again either, unless it chooses some thousand others before.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            fcntl.lockf(_CLAIMS, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.append(port)
                return port
    raise RuntimeError(f"no free port found in {_PORTS}")


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False
