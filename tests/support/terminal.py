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
from typing import NamedTuple

from tests.support.prepared_python import run_module

COLUMNS = 80
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("KVSIGHT_") and name not in ("COLUMNS", "TERM")
} | {"TERM": "dumb"}
"""Of the commands: no settings of the developer, and no colours."""


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
    return Shown(process.wait(timeout=60), output.decode().replace("\r\n", "\n"))


def piped(*arguments: object, stdin: str = "") -> Shown:
    """Run the command with pipes until it ends."""
    done = run_module("kvsight", *arguments, stdin=stdin, environment=ENVIRONMENT)
    return Shown(done.returncode, done.stdout)


def command(*arguments: object) -> list[str]:
    """The words of a command line."""
    return [sys.executable, "-m", "kvsight", *map(str, arguments)]
