"""Services under the event loop of production."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from kv_events.runtime.event_loops import new_event_loop
from tests.rigs.raw_http import Connect, a_service


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests on the loop of the server."""
    return {"uvloop": new_event_loop}


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connects to a service with the default settings. See `a_service`."""
    async with a_service() as connect:
        yield connect
