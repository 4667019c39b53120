"""Pictures of the page for the documentation: `python -m tests.support.browser.pictures [FOLDER]`"""

import asyncio
import sys
from pathlib import Path
from typing import NamedTuple

from playwright.async_api import Browser, Page

from api.app import create_app
from api.replay.service import ReplayService
from api.server import running_server
from api.settings import ApiSettings
from kv_events.log.moments import LogMoment
from tests.support.browser.chromium import Scheme, new_page, running_browser
from tests.support.browser.shown_fleet import ShownFleet, shown_fleet

_FOLDER = Path(__file__).resolve().parents[3] / "docs" / "images"
_RECORDING = _FOLDER.parents[1] / "examples" / "routing_anomaly"
_SERVE_S = 60.0
_RATE = 6.0
_HOUR_S = 3600.0
_FLEET = 200


class _Picture(NamedTuple):
    name: str
    width: int
    height: int
    scheme: Scheme = "light"
    query: str = ""


_PICTURES = (
    _Picture("page-light", 1600, 1180),
    _Picture("page-dark", 1600, 1180, "dark"),
    _Picture("page-narrow", 360, 1180),
    _Picture("page-worker", 1600, 1180, query="?worker=worker-1"),
)


async def main(folder: Path) -> None:
    """Write all pictures."""
    async with shown_fleet(ApiSettings(port=0), num_requests=300, workers=6) as shown, running_browser() as browser:
        pages = {each: await new_page(browser, each.width, each.height, each.scheme) for each in _PICTURES}
        for picture, page in pages.items():
            await page.goto(f"{shown.url}/{picture.query}")
        await _serve(shown)
        for picture, page in pages.items():
            await _settle(page)
            await page.screenshot(path=folder / f"{picture.name}.png")
        await _show_past(browser, folder / "page-past.png")
    async with (
        shown_fleet(ApiSettings(port=0), num_requests=300, workers=_FLEET) as shown,
        running_browser() as browser,
    ):
        page = await new_page(browser, 1440, 1000)
        await page.goto(shown.url)
        await _serve(shown, 10.0)
        await _settle(page)
        await page.screenshot(path=folder / "page-fleet.png")


async def _show_past(browser: Browser, picture: Path) -> None:
    """Write a picture of the page over the past of the example's recording, with what has changed since a moment."""
    settings = ApiSettings(port=0)
    async with running_server(create_app(ReplayService(_RECORDING, settings, LogMoment(), [])), settings) as url:
        page = await new_page(browser, 1400, 900)
        await page.goto(f"{url}/?at=400&from=250")
        await page.locator("#past table.difference").wait_for()
        await page.locator("#past .legend", has_text="resync", has_not_text="searching").wait_for()
        await _settle(page)
        await page.screenshot(path=picture)


async def _serve(shown: ShownFleet, seconds: float = _SERVE_S) -> None:
    """Serve requests again for some time, so that there are curves. Their decisions are of the last hour."""
    requests, number = iter(shown.requests * 100), int(seconds * _RATE)
    for left in range(number, 0, -1):
        shown.serve(next(requests), _HOUR_S * (left - 1) / number)
        await asyncio.sleep(1 / _RATE)


async def _settle(page: Page) -> None:
    await page.bring_to_front()
    await page.wait_for_timeout(2500)


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER
    chosen.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(chosen))
