"""A visit of a page that notes what the page asks for and what goes wrong in it, for tests without an event loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.browser.chromium import DEADLINE_S, FLAGS, chromium_path


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Run the Chromium of this machine. Skips the test if there is none."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """One page in a context of its own."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        """context: arguments of `Browser.new_context`, such as `color_scheme`."""
        self.page: Page = browser.new_context(**context).new_page()
        self.page.set_default_timeout(DEADLINE_S * 1000)
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
