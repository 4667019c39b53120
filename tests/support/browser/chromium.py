"""A real browser without a screen: Debian's chromium, driven by Playwright."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

Scheme = Literal["light", "dark"]

DEADLINE_S = 60
"""Of every wait for a page. A browser starts slowly on a busy machine."""
expect.set_options(timeout=DEADLINE_S * 1000)

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


async def new_page(
    browser: Browser, width: int = 1280, height: int = 900, scheme: Scheme = "light", url: str | None = None
) -> Page:
    """Open an empty page in a profile of its own. url: to which the page's addresses are relative."""
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        timezone_id="Asia/Tokyo",
        locale="en-US",
        base_url=url,
    )
    context.set_default_timeout(DEADLINE_S * 1000)
    return await context.new_page()


@asynccontextmanager
async def visiting(browser: Browser, url: str, allowed: str | None = None, **view: Any) -> AsyncIterator[Page]:
    """Yield an empty page of a service, and check at the end that nothing went wrong in it.

    allowed: part of what its console may have all the same. view: see `new_page`.
    """
    faults: list[str] = []
    page = await new_page(browser, url=url, **view)
    page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    assert [fault for fault in faults if allowed is None or allowed not in fault] == []


async def text_of(page: Page, selector: str) -> str:
    return (await page.locator(selector).inner_text()).strip()


async def shows(page: Page, selector: str, text: str) -> None:
    """Wait until an element has a text."""
    await expect(page.locator(selector)).to_contain_text(text, use_inner_text=True)


async def asked(page: Page, path: str, body: Any = None) -> Any:
    """Return what the service of a page answers to GET, or with a body to POST."""
    answer = await (page.request.get(path) if body is None else page.request.post(path, data=body))
    return await answer.json()
