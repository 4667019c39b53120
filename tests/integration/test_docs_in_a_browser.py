"""The documentation page in a real browser that cannot resolve any host name, as in a network without the internet."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from api.app import create_app
from api.server import running_server
from api.settings import ApiSettings
from tests.support.browser.chromium import chromium_path
from tests.support.log.hand_fed import HandFed


@pytest.fixture
def browser() -> str:
    """The command of the browser."""
    return chromium_path()


async def dom(browser: str, url: str, profile: Path) -> str:
    """Return the document tree of a page after its scripts have run."""
    arguments = [
        "--headless",
        "--no-sandbox",  # tests may run as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--virtual-time-budget=10000",
        "--dump-dom",
        url,
    ]
    process = await asyncio.create_subprocess_exec(
        browser, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode(errors="replace")[-2000:]
    return output.decode()


async def test_the_page_shows_every_route_and_asks_for_the_token(browser: str, tmp_path: Path) -> None:
    settings = ApiSettings(port=0, api_token="s3cret")
    app = create_app(HandFed().consumer, settings)
    async with running_server(app, settings) as url:
        page = await dom(browser, f"{url}/docs", tmp_path)
    shown = {path.replace("\u200b", "") for path in re.findall(r'data-path="([^"]+)"', page)}
    assert shown == set(app.openapi()["paths"])
    assert 'class="btn authorize' in page
