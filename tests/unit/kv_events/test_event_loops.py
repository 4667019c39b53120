"""Errors that reach an event loop although no part of the program waits for them."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.event_loops import new_event_loop
from tests.support.waiting import async_wait_until

TOO_LONG = "a." * 140
"""A name that the system refuses without a question to a name server."""


def lines_of(work: Coroutine[Any, Any, None], lines: pytest.LogCaptureFixture) -> list[str]:
    """Run something in a loop of ours, and return its warnings and errors."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)
    return [f"{each.message} {each.exc_info}" for each in lines.records if each.levelno >= logging.WARNING]


def test_a_connection_that_is_given_up_while_its_name_is_looked_up_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await KafkaConnection(KafkaSettings(kafka=f"{TOO_LONG}:9092")).check()
        await async_wait_until(has_failed, 30, "the end of the look-up")

    async def has_failed() -> bool:
        gc.collect()
        return "a look-up that was given up has failed" in caplog.text

    caplog.set_level(logging.DEBUG, "kv_events.runtime.event_loops")
    assert lines_of(give_up(), caplog) == []


def test_the_same_error_of_a_task_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise socket.gaierror(-2, "of a task")

    async def forget() -> None:
        await asyncio.wait([asyncio.create_task(fail())])
        gc.collect()

    (line,) = lines_of(forget(), caplog)
    assert line.startswith("Task exception was never retrieved")
    assert "of a task" in line
