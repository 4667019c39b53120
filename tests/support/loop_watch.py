"""Measures how long tasks of an event loop wait for each other, independently of the machine's load."""

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
    """Repeat `run` until `are_short` is true for the CPU seconds used in each turn of the loop.

    Raises AssertionError if that never happens. A busy machine may lengthen a turn in some runs, but never shortens
    one. A task that does not yield makes its turn long. With `time.process_time`, so does any other running thread,
    including one that holds the interpreter.
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
    """Yield the CPU seconds of each turn; the list is complete after the block.

    Garbage collection is off, because its duration depends on the tests that ran before.
    """
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
