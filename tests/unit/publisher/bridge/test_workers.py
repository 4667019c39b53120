"""Threads for the bridge's work: which thread does it, and who goes first."""

import asyncio
import os
import sys
import threading
import time

import pytest

from publisher.bridge.workers import Workers

LARGE = 1 << 20


async def run(num_bytes: int) -> tuple[int, int]:
    """Native id and niceness of the thread that does the work."""
    workers = Workers()
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


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux only")
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


def test_work_in_a_thread_is_done_before_a_cancelled_caller_goes_on() -> None:
    done = threading.Event()
    begun = threading.Event()

    def work() -> None:
        begun.set()
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            pass
        done.set()

    async def cancelled() -> bool:
        workers = Workers()
        task = asyncio.create_task(workers.run(LARGE, work))
        assert await asyncio.to_thread(begun.wait, 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        workers.close()
        return done.is_set()

    assert asyncio.run(cancelled())
