"""What an event loop's tasks have to wait for each other, told apart from what else the machine does."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def turns_of_the_loop() -> AsyncIterator[list[float]]:
    """CPU seconds that this process used in each turn of the loop, complete after the block.

    A task that does not give way makes its turn long, and so does a thread that keeps the interpreter to itself. On a
    busy machine only elapsed time gets longer. Garbage is not collected meanwhile: how long that takes is up to the
    tests before this one.
    """
    turns: list[float] = []

    async def tick() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0)
            turns.append(time.process_time() - before)

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
