"""What the processes of one service share, and one of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Final

from api.rate_limits import SharedCells
from kv_events.errors import InvalidValueError

BEAT_S: Final = 0.25
"""Time between two signs of life."""
_MAX_FOLDER_BYTES, _OWN_BYTES = 96, 17  # a Unix socket's path has at most 107; the folder's own name
_TEXT_BYTES = 256
_POLL_S = 0.02


class SharedState:
    """Memory that the supervisor makes before it forks, so that all processes see it, also those that come later.

    Times are monotonic seconds, 0.0 for a process that does not run.
    """

    def __init__(self, count: int, folder: Path) -> None:
        """count: number of processes. folder: for their sockets; nobody else may enter it.

        Raises InvalidValueError if its path is too long for them.
        """
        if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
            expected = f"a folder whose path has at most {_MAX_FOLDER_BYTES - _OWN_BYTES} bytes, for Unix sockets"
            raise InvalidValueError("TMPDIR", str(folder.parent), expected)
        self.count = count
        self.folder = folder
        self.limits = SharedCells()
        self._serving_since = _doubles(count)
        self._ready_since = _doubles(count)
        self._alive_at = _doubles(count)
        self._recording = mmap(-1, _TEXT_BYTES)

    def note_serving(self, number: int) -> None:
        """Note that a process begins to accept connections."""
        self._serving_since[number] = self._alive_at[number] = time.monotonic()

    def note_alive(self, number: int, *, is_ready: bool) -> None:
        """Note that the event loop of a process runs, and whether it is ready."""
        self._alive_at[number] = time.monotonic()
        if is_ready and not self._ready_since[number]:
            self._ready_since[number] = time.monotonic()

    def note_ended(self, number: int) -> None:
        """Note that a process has ended."""
        self._serving_since[number] = self._ready_since[number] = self._alive_at[number] = 0.0

    def is_serving(self, number: int) -> bool:
        """Return whether a process accepts connections."""
        return self._serving_since[number] > 0.0

    def knows_all(self, number: int) -> bool:
        """Return whether a process accepts connections and has been ready."""
        return self.is_serving(number) and self._ready_since[number] > 0.0

    def alive_at(self, number: int) -> float:
        """Return when the event loop of a process ran last."""
        return self._alive_at[number]

    def eldest(self) -> int | None:
        """Return the number of the process that serves for the longest time, or None if none serves."""
        serving = [(since, number) for number, since in enumerate(self._serving_since) if since > 0.0]
        return min(serving)[1] if serving else None

    def note_recording(self, degraded: str) -> None:
        """Note why the recording is degraded, or "". Process 0 calls it."""
        text = degraded.encode()[: _TEXT_BYTES - 1]
        self._recording[: len(text) + 1] = text + b"\0"

    def recording(self) -> str:
        """Return why the recording is degraded, or ""."""
        return bytes(self._recording).partition(b"\0")[0].decode(errors="replace")


def _doubles(count: int) -> memoryview[float]:
    return memoryview(mmap(-1, 8 * count)).cast("d")


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
        """Return when this process may accept connections: once it is ready. At once if no other process serves that
        has been ready, because callers are better off with any answer.
        """
        told_by = time.monotonic() + 2 * BEAT_S  # another process may be ready and not have said so yet

        def others_answer() -> bool:
            answers = self.shared.is_serving if time.monotonic() < told_by else self.shared.knows_all
            return any(map(answers, self.others()))

        def must_wait() -> bool:
            return bool(why_not_ready()) and others_answer() and not self.is_ending

        while must_wait():  # noqa: ASYNC110  (other processes change it)
            await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def beating(self, why_not_ready: Callable[[], str], degraded: Callable[[], str]) -> AsyncIterator[None]:
        """Tell the others in a block that the event loop runs, whether it is ready, and how the recording is."""

        async def beat() -> None:
            while True:
                self.shared.note_alive(self.number, is_ready=not why_not_ready())
                if self.leads:
                    self.shared.note_recording(degraded())
                await asyncio.sleep(BEAT_S)

        task = asyncio.create_task(beat(), name="heartbeat")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def headers_of(replica: Replica) -> list[tuple[str, str]]:
    """Return the headers of all answers of a process."""
    return [("X-Kvsight-Process", str(replica.number))]


def is_orphan(parent_pid: int) -> bool:
    """Return whether the process that started this one has ended."""
    return os.getppid() != parent_pid
