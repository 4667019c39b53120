"""The command on a terminal: a pseudo-terminal of 80 columns, as a user sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import NamedTuple, Self

from tests.support.prepared_python import run_module
from tests.support.waiting import wait_until

COLUMNS = 80
_HOME = "\x1b[H"
"""Begins a frame."""
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("KVSIGHT_") and name not in ("COLUMNS", "TERM")
} | {"TERM": "dumb", "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}
"""Of the commands: no settings of the developer, and no colours.

Where colorama is installed, as for MkDocs, numba starts it, and it writes `ESC[0m` at the end of a process.
"""


class Shown(NamedTuple):
    """What a command showed."""

    code: int
    output: str
    """stdout and stderr of a terminal; otherwise stdout."""


def on_terminal(*arguments: object) -> Shown:
    """Run the command on a terminal until it ends."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command(*arguments), stdin=follower, stdout=follower, stderr=follower, env=ENVIRONMENT, close_fds=True
    )
    os.close(follower)
    output = bytearray()
    with contextlib.suppress(OSError):  # EIO: the last user of the terminal has closed it
        while part := os.read(leader, 65_536):
            output += part
    os.close(leader)
    return Shown(process.wait(timeout=180), output.decode().replace("\r\n", "\n"))


def piped(*arguments: object, stdin: str = "") -> Shown:
    """Run the command with pipes until it ends."""
    done = run_module("kvsight", *arguments, stdin=stdin, environment=ENVIRONMENT)
    return Shown(done.returncode, done.stdout)


def command(*arguments: object) -> list[str]:
    """The words of a command line."""
    return [sys.executable, "-m", "kvsight", *map(str, arguments)]


class Screen:
    """The command on a terminal that can move its cursor: a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: object) -> None:
        self.text = ""
        """All output so far."""
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        os.set_blocking(self._leader, False)
        self._process = subprocess.Popen(
            command(*arguments),
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=ENVIRONMENT | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        os.close(follower)

    def wait_for(self, text: str, absent: str | None = None) -> None:
        """Return once a frame that is drawn from now on has a text, and lacks another one."""
        start = len(self.text)

        def is_shown() -> bool:
            self._read()
            frames = self.text[start:].split(_HOME)[1:]
            return any(text in frame and (absent is None or absent not in frame) for frame in frames)

        wait_until(is_shown, 60, f"{text!r} on the screen: {self.text[-3000:]!r}")

    def last_frame(self) -> str:
        """What the screen shows."""
        self._read()
        return self.text.split(_HOME)[-1]

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._leader, keys.encode())

    def end(self) -> int:
        """Return the exit code of the command once it has ended."""

        def has_ended() -> bool:
            self._read()
            return self._process.poll() is not None

        wait_until(has_ended, 60, "the command to end")
        self._read()
        return self._process.returncode

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while part := os.read(self._leader, 65_536):
                self.text += part.decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._leader)
