"""A service that is asked byte by byte."""

from collections.abc import AsyncIterator

import pytest

from tests.rigs.raw_http import Connect, a_service


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connects to a service with the default settings. See `a_service`."""
    async with a_service() as connect:
        yield connect
