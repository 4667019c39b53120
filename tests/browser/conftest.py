"""A browser for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.support.browser.chromium import chromium_path, running_browser


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """A running browser."""
    if chromium_path() is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    async with running_browser() as running:
        yield running
