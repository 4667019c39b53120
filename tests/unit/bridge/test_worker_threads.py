"""The bridge's worker threads: their assignment and their priority."""

import asyncio
import os
import threading

import pytest

from bridge.worker_threads import WorkerThreads

LARGE = 1 << 20


async def run(num_bytes: int) -> tuple[int, int]:
    """Return the native id and the niceness of the thread that does the work."""
    workers = WorkerThreads()
    try:
        return await workers.run(num_bytes, _me)
    finally:
        workers.close()


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


async def test_work_in_a_thread_is_done_before_a_cancelled_caller_continues() -> None:
    begun, may_end = threading.Event(), threading.Event()
    workers = WorkerThreads()

    def work() -> bool:
        begun.set()
        return may_end.wait(10)

    caller = asyncio.create_task(workers.run(LARGE, work))
    assert await asyncio.to_thread(begun.wait, 10)
    caller.cancel()
    done, _ = await asyncio.wait([caller], timeout=0.05)
    assert not done
    may_end.set()
    await asyncio.wait_for(asyncio.wait([caller]), 10)
    assert caller.cancelled()
    workers.close()
