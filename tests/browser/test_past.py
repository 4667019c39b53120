"""The page over the past in a real browser."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page

from api.app import create_app
from api.replay.service import ReplayService
from api.server import running_server
from api.settings import ApiSettings
from kv_events.log.event_log import EventLogWriter
from kv_events.log.moments import LogMoment
from tests.support.browser.chromium import DEADLINE_S, asked, shows, visiting
from tests.support.log.records import Stream, removed, stored
from tests.support.waiting import async_wait_until

pytestmark = [pytest.mark.timing("a browser must show it within seconds"), pytest.mark.asyncio(loop_scope="module")]

HOSTILE = '<img src=x onerror="document.title=1">'
NUM_SECONDS = 120


def write_log(folder: Path, name: str = "w-1") -> Path:
    """Two workers for two minutes. w-1 loses a batch in second 60, and resends what it holds in second 80."""
    one, other = Stream("w-0"), Stream(name)
    with EventLogWriter(folder) as writer:
        for i in range(NUM_SECONDS):
            events = [stored((0, [i + 1]))] if i < 100 else [removed([i - 99])]
            writer.append(one.batch(*events, now=1_700_000_000 + i))
            late = other.resync(now=1_700_000_000.5 + i) if i == 80 else other.batch(now=1_700_000_000.5 + i)
            if i != 60:
                writer.append(late)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log"))


@asynccontextmanager
async def serving(browser: Browser, folder: Path, *damage: str, allowed: str | None = None) -> AsyncIterator[Page]:
    """A page over a log."""
    settings = ApiSettings(port=0)
    app = create_app(ReplayService(folder, settings, LogMoment(), list(damage)))
    async with running_server(app, settings) as url, visiting(browser, url, allowed) as page:
        yield page


async def shown_workers(page: Page) -> dict[str, tuple[str, str]]:
    """Worker -> its state and the words of its pages, as the table shows them."""
    rows = page.locator("#workers tbody tr")
    return {
        await row.locator(".name").inner_text(): (
            (await row.locator(".state").inner_text()).strip("●◐▲✕○ \n"),
            str(await row.locator(".tiers").get_attribute("aria-label")),
        )
        for row in await rows.all()
    }


async def served_workers(page: Page, at: str) -> dict[str, tuple[str, str]]:
    """The same from GET /workers."""
    found: dict[str, tuple[str, str]] = {}
    for worker in await asked(page, f"/workers?at={at}"):
        pages = worker["listeners"]["0"]["pages"]["GPU"]
        words = f"{pages} page{'' if pages == 1 else 's'} on GPU" if pages else "no pages"
        found[worker["instance_id"]] = (worker["state"], f"{worker['instance_id']}: {words}")
    return found


async def moment_in(page: Page) -> str:
    """The moment in the address."""
    return str(await page.evaluate("new URL(location.href).searchParams.get('at')"))


async def check_equal(page: Page, at: str) -> None:
    """Wait until the page shows a moment, and compare it with GET /workers of that moment."""
    expected = await served_workers(page, at)
    shown: dict[str, tuple[str, str]] = {}

    async def is_equal() -> bool:
        nonlocal shown
        shown = await shown_workers(page)
        return shown == expected

    try:
        await async_wait_until(is_equal, DEADLINE_S)
    except AssertionError:
        assert shown == expected
        raise


async def test_the_page_at_a_moment_is_what_the_workers_were_then(browser: Browser, log: Path) -> None:
    async with serving(browser, log) as page:
        for at in ("30", "125", "@1700000070", "2023-11-14T22:13:29.600Z", "239"):
            await page.goto(f"/?at={at}")
            await check_equal(page, at)
            moment = await asked(page, f"/moment?at={at}")
            await shows(page, "#past .controls", f"record {moment['index']} of 239")


async def test_keys_step_from_batch_to_batch_and_from_mark_to_mark(browser: Browser, log: Path) -> None:
    async with serving(browser, log) as page:
        await page.goto("/?at=50")
        await shows(page, "#past .legend", "1 fault")
        await shows(page, "#past .controls", "record 50 of 239")
        await page.locator("#past .slider").focus()
        for key, at in (("ArrowRight", "51"), ("ArrowRight", "52"), ("ArrowLeft", "51")):
            await page.keyboard.press(key)
            await shows(page, "#past .controls", f"record {at} of 239")
            await page.wait_for_url(f"**/*at={at}*")  # addresses follow a moment later
            await check_equal(page, at)
        span = await asked(page, "/span")
        places = [mark["index"] + 1 for mark in span["marks"]]
        assert [mark["kind"] for mark in span["marks"]] == ["gap", "resync"]
        for key, place in (("PageUp", places[0]), ("PageUp", places[1]), ("PageDown", places[0])):
            await page.keyboard.press(key)
            await shows(page, "#past .controls", f"record {place} of 239")
        await check_equal(page, str(places[0]))
        await page.go_back()
        await shows(page, "#past .controls", f"record {places[1]} of 239")
        await page.locator("#past summary").click()
        await shows(page, "#past details", "w-1: batch 60 is missing.")


async def test_a_played_log_moves_on_until_it_is_paused(browser: Browser, log: Path) -> None:
    async with serving(browser, log) as page:
        await page.goto("/?at=2")
        await shows(page, "#past .controls", "record 2 of 239")
        await page.get_by_label("Speed").select_option("1000")
        await page.get_by_label("Play (space)").click()

        async def is_at_end() -> bool:
            return await moment_in(page) == f"@{(await asked(page, '/span'))['last_time']}".removesuffix(".0")

        await async_wait_until(is_at_end, DEADLINE_S)
        await page.get_by_label("Play (space)").wait_for()  # it has paused by itself
        await check_equal(page, "239")


async def test_two_moments_are_compared_and_the_address_shows_them_again(browser: Browser, log: Path) -> None:
    async with serving(browser, log) as page:
        await page.goto("/?at=101")
        await shows(page, "#past .controls", "record 101 of 239")
        await page.get_by_text("Compare with this moment").click()
        await shows(page, "#past", "Go to another moment")
        await page.goto(f"{page.url.replace('at=101', 'at=239')}")
        await shows(page, "#past table.difference", "w-0")
        (row,) = await page.locator("#past table.difference tbody tr").all()
        (found,) = [each for each in await asked(page, "/diff?from=101&at=239") if each["gained"] or each["lost"]]
        numbers = [int(text) for text in await row.locator(".number").all_inner_texts()]
        assert numbers == [found[field] for field in ("before", "after", "gained", "lost", "moved")]
        assert numbers[2:] == [49, 20, 0]
        await page.get_by_text("Stop comparing").click()
        await page.locator("#past table.difference").wait_for(state="detached")


async def test_damage_and_hostile_names_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    async with serving(browser, write_log(tmp_path, HOSTILE), f"{HOSTILE}: damaged at byte 7") as page:
        await page.goto("/?at=200")
        await shows(page, "#past [role=alert]", f"{HOSTILE}: damaged at byte 7")
        await page.locator("#past summary").click()
        await shows(page, "#past details", f"{HOSTILE}: batch 60 is missing.")
        await shows(page, "#workers tbody", HOSTILE)
        assert "kvsight" in await page.title()
        nameless: Any = await page.evaluate(
            "() => [...document.querySelectorAll('#past button, #past input, #past select, #past [role=img]')]"
            ".filter(e => !e.getAttribute('aria-label') && !e.innerText).map(e => e.outerHTML)"
        )
        assert json.dumps(nameless) == "[]"


async def test_many_moments_in_a_row_change_the_address_a_few_times(browser: Browser, log: Path) -> None:
    async with serving(browser, log) as page:
        await page.goto("/?at=50")
        await shows(page, "#past .controls", "record 50 of 239")
        await page.evaluate(
            "window.written = 0; const write = history.replaceState.bind(history);"
            "history.replaceState = (...all) => { window.written += 1; write(...all); }; 0"
        )
        began = time.monotonic()
        for at in range(51, 101):
            await page.evaluate(
                f"import('./page/state.js').then(({{ set }}) => set({{ at: {at} }}, {{ push: false }}))"
            )
        await page.wait_for_url("**/*at=100*")
        assert await page.evaluate("window.written") <= 2 + (time.monotonic() - began) / 0.4


async def test_a_moment_that_cannot_be_read_is_named_with_a_way_out(browser: Browser, log: Path) -> None:
    async with serving(browser, log, allowed="422") as page:
        await page.goto("/?at=soon")
        await shows(page, "#verdict", "at: got 'soon', expected a time (ISO 8601, 15:27, -5m or @SECONDS since 1970)")
        await shows(page, "#verdict", "PARTITION:OFFSET,... Leave out the moment")
        await page.get_by_text("Leave out the moment").click()
        await shows(page, "#verdict", "2 of 2 workers live")
        await shows(page, "#past .controls", "record 239 of 239")


async def test_a_moment_outside_the_log_is_named_and_left_by_a_step_to_a_mark(browser: Browser, log: Path) -> None:
    async with serving(browser, log, allowed="422") as page:
        await page.goto("/?at=99999")
        await shows(page, "#verdict", "at: 99999 is behind the end of the log, whose moments are 1 to 239")
        await shows(page, "#past .legend", "1 fault")
        await page.get_by_label("Next mark (page up)").click()
        await shows(page, "#verdict", "2 of 2 workers live")
        await page.wait_for_url(lambda address: "99999" not in address)
        await check_equal(page, await moment_in(page))
