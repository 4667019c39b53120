"""Applications for the tests of the API, under the event loop of production."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest

from api import background
from api.fast.heads import Head
from kv_events.runtime.event_loops import new_event_loop
from tests.rigs.api import client, fed, serving
from tests.rigs.raw_http import Connect, a_service, heads_taken

__all__ = ["client", "fed", "serving"]
background._POLL_S = 0.1  # many tests change a file that a service looks at once a second


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests on the loop of the server."""
    return {"uvloop": new_event_loop}


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connects to a service with the default settings. See `a_service`."""
    async with a_service() as connect:
        yield connect


@pytest.fixture
def taken() -> Iterator[list[Head]]:
    """See `heads_taken`."""
    with heads_taken() as heads:
        yield heads
