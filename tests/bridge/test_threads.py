"""The bridge's worker threads: their assignment and their priority."""

import asyncio
import itertools
import os
import threading
from collections.abc import Generator

import pytest

from bridge.registry import DecodeThreads

LARGE = 1 << 20


async def run(num_bytes: int) -> tuple[int, int]:
    """Return the native id and the niceness of the thread that does the work."""
    workers = DecodeThreads()
    try:
        return await workers.run(num_bytes, _my_step())
    finally:
        workers.close()


def _my_step() -> Generator[None, None, tuple[int, int]]:
    yield from ()
    return _me()


def _me() -> tuple[int, int]:
    own = threading.get_native_id()
    return own, os.getpriority(os.PRIO_PROCESS, own)


def test_little_work_is_done_at_once_and_much_of_it_in_a_thread() -> None:
    here = threading.get_native_id()
    assert asyncio.run(run(1))[0] == here
    assert asyncio.run(run(LARGE))[0] != here


def test_threads_step_back_behind_the_event_loop() -> None:
    _, here = _me()
    assert asyncio.run(run(LARGE))[1] > here
    assert _me()[1] == here


def test_where_a_mocked_system_refuses_another_niceness_work_is_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert asyncio.run(run(LARGE))[0] != threading.get_native_id()


async def test_a_cancelled_caller_waits_for_the_current_step_and_leaves_out_the_rest() -> None:
    begun, may_end = threading.Event(), threading.Event()
    workers = DecodeThreads()

    def work() -> Generator[None, None, None]:
        begun.set()
        assert may_end.wait(10)
        done_steps.append(1)
        yield
        for number in itertools.count(2):
            done_steps.append(number)
            yield

    done_steps: list[int] = []
    caller = asyncio.create_task(workers.run(LARGE, work()))
    assert await asyncio.to_thread(begun.wait, 10)
    caller.cancel()
    done, _ = await asyncio.wait([caller], timeout=0.05)
    assert not done
    may_end.set()
    await asyncio.wait_for(asyncio.wait([caller]), 10)
    assert caller.cancelled()
    assert done_steps
    num_steps = len(done_steps)
    assert await workers.run(LARGE, _my_step())  # the pool is free
    assert len(done_steps) == num_steps
    workers.close()
