"""What processes and their tasks share: settings, event loops, pauses and repeated warnings."""

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import psutil
import pytest
from pydantic import Field

from kv_events.errors import InvalidValueError, KvsightError
from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.event_loops import new_event_loop
from kv_events.runtime.helper_process import helper_results
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.supervised import Backoff, keep_running, pause_s
from tests.support.waiting import async_wait_until

# --- settings -------------------------------------------------------------------------------------------------------


class Settings(KvsightSettings):
    block_size: int
    tenant: str = "default"
    patience: float = Field(1.0, gt=0)


def test_arguments_come_before_variables_which_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIGHT_TENANT", "t")
    monkeypatch.setenv("KVSIGHT_BLOCK_SIZE", "1")
    monkeypatch.setenv("PATIENCE", "7")  # a constructor argument has no variable
    for made, tenant in (
        (Settings(block_size=2), "t"),
        (Settings.ignoring_environment(block_size=2), "default"),
        (Settings.from_flags(block_size=2, tenant=None), "t"),
    ):
        assert (made.block_size, made.tenant, made.patience) == (2, tenant, 1.0)
    assert Settings.from_flags(block_size=None, patience=3.0).patience == 3.0


@pytest.mark.parametrize(
    ("topics", "variable"),
    [
        ({"events_topic": "two words"}, "KVSIGHT_EVENTS_TOPIC"),
        ({"control_topic": ""}, "KVSIGHT_CONTROL_TOPIC"),
        ({"events_topic": "same", "control_topic": "same"}, "KVSIGHT_CONTROL_TOPIC"),
        ({"events_topic": "same", "decisions_topic": "same"}, "--decisions-topic"),
    ],
)
def test_topics_that_cannot_work_are_refused(topics: dict[str, str], variable: str) -> None:
    with pytest.raises(InvalidValueError, match=variable):
        KafkaSettings(**topics)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "KVSIGHT_BLOCK_SIZE: got None, expected a value"),
        ({"block_size": "x"}, "KVSIGHT_BLOCK_SIZE: got 'x', expected a valid integer"),
        ({"block_size": 1, "patience": 0.0}, "patience: got 0.0, expected a number greater than 0"),
    ],
)
def test_a_bad_value_is_named_in_one_phrase(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{message}$"):
        Settings(**values)


# --- errors that reach an event loop although no part of the program waits for them ---------------------------------

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


# --- pauses and warnings --------------------------------------------------------------------------------------------


def test_pauses_double_up_to_the_longest_one_less_at_most_a_half() -> None:
    for attempt, full in enumerate([1.0, 2.0, 4.0, 5.0, 5.0]):
        drawn = [pause_s(attempt, 1.0, 5.0) for _ in range(100)]
        assert full / 2 <= min(drawn) < max(drawn) <= full
    assert pause_s(10_000, 1.0, 5.0) <= 5.0


async def test_a_task_starts_again_after_an_error_which_is_shown_as_text_if_it_is_expected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        if errors:
            raise errors.pop()

    for error, shown in ((KvsightError("no broker"), "no broker"), (KeyError("x"), "KeyError('x')")):
        errors: list[Exception] = [error]
        await keep_running(work, "task", logging.getLogger("supervised"))
        assert caplog.messages[-1] == f"task: failed and starts again: {shown}"
        assert bool(caplog.records[-1].exc_info) is not isinstance(error, KvsightError)


async def test_a_success_begins_again_with_the_first_pause() -> None:
    backoff = Backoff(0.001, 60.0)
    async with asyncio.timeout(10):  # without the reset the 18 pauses add up to more than two minutes
        for _ in range(2):
            for _ in range(9):
                await backoff.pause()
            assert backoff.failed_attempts == 9
            backoff.reset()


def test_each_kind_of_warning_is_logged_once_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLogger(logging.getLogger("engines"), "engine w")
    for number in range(3):
        limited.warning("batch %d is lost", number)
    limited.warning("no connection")
    assert caplog.messages == ["engine w: batch 0 is lost", "engine w: no connection"]
    assert {record.name for record in caplog.records} == {"engines"}


# --- helpers --------------------------------------------------------------------------------------------------------


def test_a_helper_that_is_cancelled_at_its_start_is_ended() -> None:
    def servers() -> set[int]:
        children = psutil.process_iter(["ppid", "cmdline"])
        own = (child for child in children if child.info["ppid"] == os.getpid())
        return {child.pid for child in own if "http.server" in (child.info["cmdline"] or ())}

    async def wait_for_it() -> None:
        async for _ in helper_results("server", "http.server", "0", "--bind", "127.0.0.1"):
            pass

    async def start_and_cancel(num_steps: int) -> None:
        task = asyncio.create_task(wait_for_it())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    for num_steps in range(10):
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(start_and_cancel(num_steps))
        assert not servers()
