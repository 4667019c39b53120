"""A real browser without a window, which notes what a page asks for and what goes wrong in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

DEADLINE_MS = 30_000


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Run the Chromium of this machine. Skips the test if there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        # tests may run as root, in containers with little shared memory
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


class Visit:
    """One page in a context of its own."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        """context: arguments of `Browser.new_context`, such as `color_scheme`."""
        self.page: Page = browser.new_context(**context).new_page()
        self.page.set_default_timeout(DEADLINE_MS)
        self.requests: list[str] = []
        """Addresses of everything that was requested, the page itself included."""
        self.faults: list[str] = []
        """Errors and warnings of the console, with violations of the page's policy, and exceptions of scripts."""
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console", lambda line: self.faults.append(line.text) if line.type in ("error", "warning") else None
        )
        self.page.goto(url)
