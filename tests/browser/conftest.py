"""A browser that the tests of a module share."""

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.support.browser.chromium import running_browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _browser() -> AsyncIterator[Browser]:
    async with running_browser() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def browser(_browser: Browser) -> AsyncIterator[Browser]:
    """A running browser. At the end of a test, its pages are closed."""
    yield _browser
    for context in _browser.contexts:
        await context.close()
