"""A running publisher, its sink and its log."""

from collections.abc import AsyncIterator

import pytest

from kv_events.log.memory import MemoryLog
from publisher import EventPublisher
from tests.rigs.publisher import FaultySink, make_running


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def sink(log: MemoryLog) -> FaultySink:
    return FaultySink(log)


@pytest.fixture
async def publisher(sink: FaultySink) -> AsyncIterator[EventPublisher]:
    async with make_running(sink, queue_pages=100) as publisher:
        yield publisher
