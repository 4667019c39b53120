"""The command on a terminal: a pseudo-terminal of 80 columns, as a user sees it."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
from typing import Self

from tests.support.commands import ENVIRONMENT
from tests.support.prepared_python import PreparedProcess
from tests.support.waiting import wait_until

COLUMNS = 80
_HOME = "\x1b[H"
"""Begins a frame."""


def on_terminal(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command on a terminal until it ends. Its stdout is what the terminal showed."""
    with Screen(*arguments, terminal="dumb") as screen:
        code = screen.end(180)
    return subprocess.CompletedProcess(list(map(str, arguments)), code, screen.text.replace("\r\n", "\n"))


class Screen:
    """The command on a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: object, terminal: str = "xterm-256color") -> None:
        """terminal: its kind. The default can move its cursor."""
        self.text = ""
        """All output so far."""
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        os.set_blocking(self._leader, False)
        self._process = PreparedProcess("kvsight", arguments, ENVIRONMENT | {"TERM": terminal}, [follower] * 3)
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

    def end(self, deadline_s: float = 60) -> int:
        """Return the exit code of the command once it has ended."""

        def has_ended() -> bool:
            self._read()
            return not self._process.running

        wait_until(has_ended, deadline_s, "the command to end")
        self._read()
        return self._process.wait(0)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while part := os.read(self._leader, 65_536):
                self.text += part.decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        os.close(self._leader)
