"""Applications for the tests of the API, under the event loop of production."""

import asyncio
from collections.abc import Callable, Mapping

from kv_events.runtime.event_loops import new_event_loop
from tests.rigs.api import client, fed, serving

__all__ = ["client", "fed", "serving"]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests on the loop of the server."""
    return {"uvloop": new_event_loop}
