"""What the processes of one service share, and one of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Final

JOIN_TIMEOUT_S: Final = 30.0
"""Longest time for which a process that is not ready stays away from the port while another one serves."""
_POLL_S = 0.02


class SharedState:
    """Memory that the supervisor makes before it forks, so that all processes see it, also those that come later."""

    def __init__(self, count: int, folder: Path) -> None:
        """count: number of processes. folder: for their sockets; nobody else may enter it."""
        self.count = count
        self.folder = folder
        self._serving_since = memoryview(mmap(-1, 8 * count)).cast("d")  # monotonic seconds; 0.0: does not serve

    def note_serving(self, number: int) -> None:
        """Note that a process begins to accept connections."""
        self._serving_since[number] = time.monotonic()

    def note_ended(self, number: int) -> None:
        """Note that a process has ended."""
        self._serving_since[number] = 0.0

    def is_serving(self, number: int) -> bool:
        """Return whether a process accepts connections."""
        return self._serving_since[number] > 0.0

    def eldest(self) -> int | None:
        """Return the number of the process that serves for the longest time, or None if none serves."""
        serving = [(since, number) for number, since in enumerate(self._serving_since) if since > 0.0]
        return min(serving)[1] if serving else None


@dataclass
class Replica:
    """One of the processes, as it knows itself."""

    number: int
    """From 0. Number 0 leads: it alone writes snapshots, dead letters and the recording."""
    shared: SharedState
    is_ending: bool = field(default=False, init=False)
    """Whether it was asked to end."""

    @property
    def leads(self) -> bool:
        """Whether this process does what must happen once."""
        return self.number == 0

    def others(self) -> list[int]:
        """Return the numbers of the other processes."""
        return [number for number in range(self.shared.count) if number != self.number]

    def socket_of(self, number: int) -> Path:
        """Return the address at which a process answers the others."""
        return self.shared.folder / f"{number}.sock"

    def counts_of(self, number: int) -> Path:
        """Return the file with what a process has counted."""
        return self.shared.folder / f"{number}.counts"

    async def join(self, why_not_ready: Callable[[], str]) -> None:
        """Return when this process may accept connections: once it is ready, so that callers are not moved to a process
        that knows less. Without another process that serves, at once; otherwise after `JOIN_TIMEOUT_S` at the latest.
        """
        give_up = time.monotonic() + JOIN_TIMEOUT_S

        def must_wait() -> bool:
            return bool(why_not_ready()) and self._others_serve() and not self.is_ending and time.monotonic() < give_up

        while must_wait():  # noqa: ASYNC110  (other processes change it)
            await asyncio.sleep(_POLL_S)
        self.shared.note_serving(self.number)

    def _others_serve(self) -> bool:
        return any(map(self.shared.is_serving, self.others()))


def headers_of(replica: Replica) -> list[tuple[str, str]]:
    """Return the headers of all answers of a process."""
    return [("X-Kvsight-Process", str(replica.number))]


def is_orphan(parent_pid: int) -> bool:
    """Return whether the process that started this one has ended."""
    return os.getppid() != parent_pid
