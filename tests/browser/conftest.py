"""A browser for each test."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.support.browser.chromium import running_browser


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """A running browser."""
    async with running_browser() as running:
        yield running
