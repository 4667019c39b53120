"""A real browser without a screen: Debian's chromium, driven by Playwright."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
from playwright.async_api import Browser, Page, async_playwright

Scheme = Literal["light", "dark"]

DEADLINE_S = 60
"""Of every wait for a page. A browser starts slowly on a busy machine."""

FLAGS = (
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # as in a network without the internet
)


def chromium_path() -> str:
    """Return the command of the browser. Skips the test if there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    return found


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Run the browser in a block."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


async def new_page(browser: Browser, width: int = 1280, height: int = 900, scheme: Scheme = "light") -> Page:
    """Open an empty page in a profile of its own."""
    context = await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, timezone_id="Asia/Tokyo", locale="en-US"
    )
    context.set_default_timeout(DEADLINE_S * 1000)
    return await context.new_page()
