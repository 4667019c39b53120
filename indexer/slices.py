"""Runs work in short slices on the event loop, so that queries are answered between them."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

_SLICE_S = 0.001
"""Duration of a slice, after which queries are answered."""


def run_at_once(steps: Iterator[None]) -> Any:
    """Run a generator to its end without pauses. Returns what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class Slices:
    """Measures how long one owner has run on the event loop, and yields after a millisecond, or after `slice_s`."""

    def __init__(self, slice_s: float = _SLICE_S) -> None:
        self._slice_s = slice_s
        self._began = time.perf_counter()
        self._before_s = 0.0  # in earlier slices

    @property
    def spent_s(self) -> float:
        """The time so far, without the pauses."""
        return self._before_s + time.perf_counter() - self._began

    async def run(self, steps: Iterator[None]) -> Any:
        """Run a generator to its end, with pauses between its steps. Returns what it returns."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            await self.yield_if_due()

    async def yield_if_due(self) -> None:
        """Let other tasks run if this slice has lasted long enough."""
        took_s = time.perf_counter() - self._began
        if took_s > self._slice_s:
            self._before_s += took_s
            await asyncio.sleep(0)
            self._began = time.perf_counter()


class Interval:
    """Reports when a periodic task is due. Times are monotonic seconds."""

    def __init__(self, period_s: float, first_at: float = 0.0) -> None:
        self._period_s = period_s
        self._next_at = first_at

    def is_due(self, now: float) -> bool:
        """Return whether the task is due. True starts the next period."""
        if now < self._next_at:
            return False
        self._next_at = now + self._period_s
        return True
