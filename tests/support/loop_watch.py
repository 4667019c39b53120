"""Measures how long tasks of an event loop wait for each other, independent of the machine's load."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

_TRIES = 6


async def check_turns(
    run: Callable[[], Awaitable[object]],
    are_short: Callable[[list[float]], bool],
    cpu_time: Callable[[], float] = time.thread_time,
) -> None:
    """Run until once `are_short` of the CPU seconds that were used in each turn of the loop; raises AssertionError when
    that never happens. A busy machine may lengthen a turn, but it never shortens one, and not all runs meet it.

    A task that does not give way makes its turn long; with `time.process_time`, so does a thread that keeps the
    interpreter to itself, but also any other that runs.
    """
    longest = []
    for _ in range(_TRIES):
        async with _turns_of_the_loop(cpu_time) as turns:
            await run()
        if are_short(turns):
            return
        longest.append(f"{max(turns):.3f} of {sum(turns):.3f}")
    raise AssertionError(f"longest turn of the loop in {_TRIES} runs, seconds: {', '.join(longest)}")


@asynccontextmanager
async def _turns_of_the_loop(cpu_time: Callable[[], float]) -> AsyncIterator[list[float]]:
    """Complete after the block. No garbage is collected: how long that takes is up to the tests before this one."""
    turns: list[float] = []

    async def tick() -> None:
        while True:
            before = cpu_time()
            await asyncio.sleep(0)
            turns.append(cpu_time() - before)

    gc.collect()
    gc.disable()
    ticking = asyncio.create_task(tick())
    try:
        await asyncio.sleep(0)
        yield turns
        await asyncio.sleep(0)
    finally:
        ticking.cancel()
        gc.enable()
