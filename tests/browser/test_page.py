"""The live page in a real browser."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from playwright.async_api import Browser, Locator, Page

from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from kv_events.log.event_log import EventLogWriter
from tests.support.browser.chromium import DEADLINE_S, new_page
from tests.support.browser.shown_fleet import shown_fleet
from tests.support.log.hand_fed import HandFed
from tests.support.log.planted_causes import VICTIM, planted
from tests.support.log.records import Stream, removed, stored
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("a browser must show a change within seconds")

TOKENS = list(range(1, 65))
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'

UNSEEN = {
    "w": "w",
    "\ufeffw": "<U+FEFF>w",
    "w ": "w<U+0020>",
    "w\u00a0w": "w<U+00A0>w",
    "w w": "w w",
    " ": "<U+0020>",
    "\u200b\u3164": "<U+200B><U+3164>",
    "\u202ew": "<U+202E>w",
    "<U+FEFF>w": "<U+003C>U+FEFF>w",
    "\U000e0041": "<U+E0041>",
}
"""Names, and how they are shown."""
CODES = re.compile(r"<U\+[0-9A-F]+>")

NAMELESS = """
() => [...document.querySelectorAll('button, input, select, textarea, a, [role=img], [role=region]')]
  .filter(e => e.checkVisibility() && !e.getAttribute('aria-label') && !e.innerText && !(e.labels ?? []).length)
  .filter(e => !e.querySelector('title')?.textContent)
  .map(e => e.outerHTML)
"""


OVERLAP = """
row => row.querySelector('.prefix').getBoundingClientRect().right - row.querySelector('td').getBoundingClientRect().left
"""


class AliveFed(HandFed):
    """A consumer whose streams send heartbeats, so that a slow machine does not make them stale."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Stream] = []

    async def hold(self, stream: Stream, *arguments: Any, **options: Any) -> list[int]:
        """Store a prompt. The stream sends heartbeats from now on."""
        if stream not in self.alive:
            self.alive.append(stream)
        return await super().hold(stream, *arguments, **options)

    async def beat(self) -> None:
        """Send heartbeats forever."""
        while True:
            await self.feed(*(stream.batch() for stream in self.alive))
            await asyncio.sleep(1)


@asynccontextmanager
async def hand_fed(**settings: Any) -> AsyncIterator[tuple[str, AliveFed]]:
    """The URL of a service whose records a test writes."""
    fed, given = AliveFed(), ApiSettings(port=0, **settings)
    async with running_server(create_app(LiveService(fed.consumer, given)), given) as url:
        await fed.feed()
        beating = asyncio.create_task(fed.beat())
        yield url, fed
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def opened(browser: Browser, url: str, faults: list[str], **view: Any) -> Page:
    """Open a page. faults: receives the errors of its console, such as violations of the policy, and of its scripts."""
    page = await new_page(browser, **view)
    page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    await page.goto(url)
    return page


async def text_of(page: Page, selector: str) -> str:
    return (await page.locator(selector).inner_text()).strip()


async def wait_for_text(page: Page, selector: str, text: str) -> None:
    async def is_shown() -> bool:
        return text in await page.locator(selector).inner_text()

    await async_wait_until(is_shown, DEADLINE_S, f"{text!r} in {selector}")


async def test_the_page_opens_while_somebody_holds_all_connections(browser: Browser) -> None:
    faults: list[str] = []
    async with hand_fed(max_connections=100) as (url, fed), AsyncExitStack() as held:
        await fed.hold(Stream("w"), TOKENS)
        for _ in range(400):
            _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            held.callback(writer.close)
        page = await opened(browser, url, faults)
        await wait_for_text(page, "#workers tbody tr .name", "w")
        assert faults == []


async def test_the_page_shows_every_worker_of_a_fleet_and_what_it_holds(browser: Browser) -> None:
    faults: list[str] = []
    async with shown_fleet(ApiSettings(port=0)) as shown, httpx.AsyncClient(base_url=shown.url) as client:
        page = await opened(browser, shown.url, faults)
        await wait_for_text(page, "#verdict", "3 of 3 workers live. Views equal the engines' caches as of")
        names = [f"worker-{number}" for number in range(3)]
        assert await page.locator("#workers tbody tr .name").all_inner_texts() == names
        fleet = (await client.get("/fleet")).json()
        bars = page.locator("#workers tbody .tiers")
        for number, worker in enumerate(fleet["workers"]):
            label = await bars.nth(number).get_attribute("aria-label")
            assert f"{worker['pages']['GPU']:,} page" in str(label), (label, worker["pages"])
        await page.locator("#residency").scroll_into_view_if_needed()
        await wait_for_text(page, "#residency thead", "worker-2")
        residency = (await client.get("/residency")).json()
        row = page.locator("#residency tbody tr").first
        assert await row.evaluate(OVERLAP) <= 0
        assert (await row.locator("code").inner_text()) == residency["rows"][0]["hash"][:8]
        assert f"{residency['rows'][0]['pages']:,} page" in await row.inner_text()
        await page.locator("#decisions").scroll_into_view_if_needed()
        await wait_for_text(page, "#decisions", "60 requests in the last hour, 60 with an outcome")
        await page.keyboard.press("Control+Home")
        await page.locator("#workers tbody tr .name").first.focus()
        await page.keyboard.press("Enter")
        await wait_for_text(page, "#worker", "Hottest prefixes")
        await wait_for_text(page, "#worker", "in the last")
        assert "worker=worker-0" in page.url
        await page.go_back()
        await wait_for_text(page, "#workers", "worker-2")
        assert faults == []


async def test_the_page_follows_a_gap_a_resync_and_a_worker_that_leaves(browser: Browser) -> None:
    faults: list[str] = []
    good, broken = Stream("good"), Stream("broken")
    async with hand_fed() as (url, fed):
        await fed.hold(good, TOKENS)
        hashes = await fed.hold(broken, TOKENS)
        page = await opened(browser, url, faults)
        await wait_for_text(page, "#verdict", "2 of 2 workers live")
        broken.batch(removed(hashes[:1]))
        await fed.feed(broken.batch(removed(hashes[1:2])))
        await wait_for_text(page, "#verdict", "broken stale since")
        await wait_for_text(page, "#verdict", "1 batch lost")
        assert (await page.locator("#workers tbody tr .name").all_inner_texts())[0] == "broken"
        time = page.locator("#verdict time")
        assert str(await time.get_attribute("title")).endswith(" UTC")
        await fed.feed(broken.resync())
        await wait_for_text(page, "#verdict", "2 of 2 workers live")
        fed.alive.remove(broken)
        await fed.feed(broken.batch(degraded_reason="closed"))
        await wait_for_text(page, "#verdict", "broken left at")
        await wait_for_text(page, "#workers", "left")
        assert faults == []


async def test_the_ask_box_shows_what_a_query_returns(browser: Browser) -> None:
    faults: list[str] = []
    async with hand_fed() as (url, fed), httpx.AsyncClient(base_url=url) as client:
        await fed.hold(Stream("whole"), TOKENS)
        await fed.hold(Stream("half"), TOKENS, tiers={0: range(4), 1: range(4, 8)})
        page = await opened(browser, url, faults)
        await wait_for_text(page, "#workers", "whole")
        body = {"model_name": "m", "token_ids": TOKENS}
        for asked in (" ".join(map(str, TOKENS)), json.dumps(TOKENS), json.dumps(body)):
            await page.get_by_label("A prompt").fill(asked)
            await page.get_by_role("button", name="Ask", exact=True).click()
            await wait_for_text(page, "#ask", "2 workers hold a part of 64 tokens.")
            rows = await page.locator("#ask tbody tr").all_inner_texts()
            held = {name: found["longest_matched"] for name, found in (await query(client, body)).items()}
            for row, name in zip(rows, ("whole", "half"), strict=True):  # cells adjoin before layout
                assert row.startswith(name), rows
                assert f"{held[name]} tokens" in row, rows
        assert "all 16 whole pages" in rows[0]
        assert "ends before page 9 of 16" in rows[1]
        bar = page.locator("#ask tbody tr").nth(1).locator(".tiers")
        assert await bar.get_attribute("aria-label") == "half: 16 tokens on GPU, 16 on CPU of 64"
        await wait_for_text(page, "#ask", "start it with --record FOLDER")
        await page.get_by_label("A prompt").fill("{")
        await page.get_by_role("button", name="Ask", exact=True).click()
        await wait_for_text(page, "#ask [role=alert]", "The request body is not JSON")
        assert all("404" in fault for fault in faults), faults  # there is no log to explain from


async def query(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    instances: dict[str, Any] = (await client.post("/query", json=body)).json()["instances"]
    return instances


async def test_the_ask_box_tells_why_a_prefix_ends(browser: Browser, tmp_path: Path) -> None:
    faults: list[str] = []
    scene, _ = planted("evicted", 100)
    with EventLogWriter(tmp_path) as writer:
        for record in scene.records:
            writer.append(record)
    fed, settings = HandFed(), ApiSettings(port=0)
    async with running_server(create_app(LiveService(fed.consumer, settings, event_log=tmp_path)), settings) as url:
        await fed.feed(*scene.records)
        page = await opened(browser, url, faults)
        await wait_for_text(page, "#workers", VICTIM)
        await page.get_by_label("A prompt").fill(json.dumps(scene.body))
        await page.get_by_role("button", name="Ask", exact=True).click()
        await wait_for_text(page, "#ask", VICTIM)
        await async_wait_until(lambda: have_reasons(page), DEADLINE_S, "the reasons")
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
            found = (await client.post("/explain", json=scene.body)).json()
        shown = await text_of(page, "#ask")
        assert found["workers"]
        assert all(worker["findings"][0]["text"] in shown for worker in found["workers"]), (found, shown)
        assert faults == []


async def have_reasons(page: Page) -> bool:
    return "Looking for the reasons" not in await text_of(page, "#ask")


async def test_rows_stay_where_they_are_while_somebody_reads(browser: Browser) -> None:
    faults: list[str] = []
    streams = [Stream(f"worker-{number}") for number in range(40)]
    async with hand_fed() as (url, fed):
        for stream in streams:
            await fed.hold(stream, TOKENS)
        page = await opened(browser, url, faults)
        names = page.locator("#workers tbody tr .name")
        await wait_for_text(page, "#workers", "worker-39")
        before = await names.all_inner_texts()
        await page.mouse.wheel(0, 600)
        await async_wait_until(lambda: page.evaluate("scrollY > 100"), DEADLINE_S)
        fed.alive.remove(streams[30])
        await fed.feed(streams[30].batch(degraded_reason="engine not heard"))
        await wait_for_text(page, "#held", "Catch up")
        assert await names.all_inner_texts() == before
        await page.get_by_role("button", name="Catch up").click()
        await async_wait_until(lambda: first_is(names, "worker-30"), DEADLINE_S, "the troubled worker first")
        assert faults == []


async def first_is(names: Locator, name: str) -> bool:
    return (await names.all_inner_texts())[0] == name


MAP = """
() => ({
  heads: [...document.querySelectorAll('#residency thead th')].slice(1).map(e => e.innerText.replace('▲ ', '')),
  rows: [...document.querySelectorAll('#residency tbody tr')].map(row => ({
    isGone: row.classList.contains('gone'),
    labels: [...row.querySelectorAll('.tiers')].map(e => e.getAttribute('aria-label')),
    parts: row.querySelectorAll('.tiers span').length,
  })),
})
"""


async def test_cells_of_the_map_stay_under_their_workers_while_somebody_reads(browser: Browser) -> None:
    faults: list[str] = []
    leaving = Stream("m-2")
    async with hand_fed() as (url, fed):
        await fed.hold(Stream("m-1"), TOKENS)
        await fed.hold(leaving, TOKENS)
        others = await fed.hold(leaving, list(range(500, 540)))
        page = await opened(browser, url, faults, height=500)
        await page.locator("#residency").scroll_into_view_if_needed()
        await wait_for_text(page, "#residency thead", "m-2")
        await page.mouse.wheel(0, 900)
        await async_wait_until(lambda: page.evaluate("scrollY >= 60"), 60, "a page that is scrolled")
        await fed.feed(leaving.batch(removed(others)))
        await fed.hold(Stream("a-0"), [*TOKENS[:4], *range(900, 960)])  # its column is the first one
        shown: dict[str, Any] = {}

        async def is_gone() -> bool:
            nonlocal shown
            shown = await page.evaluate(MAP)
            return shown["heads"] == ["a-0", "m-1", "m-2"] and any(row["isGone"] for row in shown["rows"])

        await async_wait_until(is_gone, 60, "a row without its prefix")
        assert [[label.partition(":")[0] for label in row["labels"]] for row in shown["rows"]] == [shown["heads"]] * 2
        assert [row["parts"] for row in shown["rows"] if row["isGone"]] == [0]
        assert faults == []


async def test_a_service_that_hangs_is_not_green(browser: Browser) -> None:
    faults: list[str] = []
    async with hand_fed() as (url, fed):
        await fed.hold(Stream("one"), TOKENS)
        page = await opened(browser, url, faults)
        await wait_for_text(page, "#verdict", "1 of 1 workers live")
        await page.route("**/fleet*", lambda _: None)  # which is never answered
        await wait_for_text(page, "#verdict", "The service does not answer. Figures below are")
        await page.unroute("**/fleet*")
        await wait_for_text(page, "#verdict", "1 of 1 workers live")
        assert faults == []


async def test_one_worker_shows_its_batches_as_they_arrive(browser: Browser) -> None:
    faults: list[str] = []
    stream = Stream("one/a b", model="m")
    async with hand_fed() as (url, fed):
        await fed.hold(stream, TOKENS)
        fed.alive.clear()  # a heartbeat is a batch, too
        page = await opened(browser, f"{url}/?{urlencode({'worker': 'one/a b', 'model': 'm'})}", faults)
        await wait_for_text(page, "#worker", "Waiting for the next batch.")
        await wait_for_text(page, "#worker", "joined")

        async def is_shown() -> bool:  # the page may not listen yet
            await fed.feed(stream.batch(stored((0, [stream.seq + 1000, stream.seq + 2000]))))
            return "2 pages" in await text_of(page, "#worker")

        await async_wait_until(is_shown, DEADLINE_S, "a batch of two pages")
        await page.get_by_role("button", name="Ask for a resync").click()
        await wait_for_text(page, "#worker", "Asked 1 stream at")
        await async_wait_until(lambda: fed.consumer.resyncs.requested, DEADLINE_S, "the request")
        assert faults == []


async def test_names_from_outside_are_text(browser: Browser) -> None:
    faults: list[str] = []
    async with hand_fed() as (url, fed):
        stream = Stream(HOSTILE, model=HOSTILE)
        await fed.hold(stream, TOKENS)
        fed.alive.clear()
        await fed.feed(stream.batch(degraded_reason=HOSTILE))
        page = await opened(browser, url, faults)
        await wait_for_text(page, "#workers", HOSTILE)
        await wait_for_text(page, "#verdict", HOSTILE)
        await page.locator("#residency").scroll_into_view_if_needed()
        await wait_for_text(page, "#residency thead", HOSTILE)
        await page.keyboard.press("Control+Home")
        await page.locator("#workers tbody tr .name").first.click()
        await wait_for_text(page, "#worker", HOSTILE)
        assert await page.locator("img, main script, body script").count() == 0
        assert "kvsight" in await page.title()
        assert faults == []


async def test_names_that_look_like_nothing_or_like_others_are_shown_by_code_points(browser: Browser) -> None:
    faults: list[str] = []
    async with hand_fed() as (url, fed):
        for worker in UNSEEN:
            await fed.hold(Stream(worker, model="\u2066m"), TOKENS)
        page = await opened(browser, url, faults)
        shown = page.locator("#workers tbody .name")
        await async_wait_until(lambda: has_texts(shown, sorted(UNSEEN.values())), DEADLINE_S, "all names")
        labels = await page.locator("#workers tbody .tiers").evaluate_all("bars => bars.map((bar) => bar.ariaLabel)")
        assert sorted(label.rpartition(":")[0] for label in labels) == sorted(UNSEEN.values())
        code_points = await page.locator("#workers tbody .name .code-point").all_inner_texts()
        assert sorted(code_points) == sorted(code for text in UNSEEN.values() for code in CODES.findall(text))
        assert "<U+2066>m" in await text_of(page, "#workers")
        assert await page.locator("#ask-model option").all_inner_texts() == ["<U+2066>m"]
        await page.locator("#residency").scroll_into_view_if_needed()
        heads = page.locator("#residency thead th")
        await async_wait_until(
            lambda: has_texts(heads, sorted(["Prefix", *UNSEEN.values()])), DEADLINE_S, "all columns"
        )
        await page.keyboard.press("Control+Home")
        await shown.filter(has_text="<U+FEFF>").click()
        await wait_for_text(page, "#worker", "<U+2066>m")
        assert await text_of(page, "#worker-title") == "<U+FEFF>w"
        assert faults == []


async def has_texts(found: Locator, texts: list[str]) -> bool:
    return sorted(await found.all_inner_texts()) == texts


async def test_the_page_asks_for_the_token_and_keeps_it_in_the_tab(browser: Browser) -> None:
    faults: list[str] = []
    async with hand_fed(api_token="s3cret") as (url, fed):
        await fed.hold(Stream("one"), TOKENS)
        page = await opened(browser, url, faults)
        await page.locator("#token-field").fill("wrong")
        await page.keyboard.press("Enter")
        await wait_for_text(page, "#token [role=alert]", "does not know this token")
        await page.locator("#token-field").fill("s3cret")
        await page.keyboard.press("Enter")
        await wait_for_text(page, "#verdict", "1 of 1 workers live")
        await page.reload()
        await wait_for_text(page, "#verdict", "1 of 1 workers live")
        assert await page.evaluate("localStorage.length + document.cookie.length") == 0
        assert all("401" in fault for fault in faults), faults


async def test_a_token_that_cannot_read_is_asked_for_again(browser: Browser, tmp_path: Path) -> None:
    tokens = {scope: f"token-of-{scope}-0123456789" for scope in ("decisions", "read")}
    file = tmp_path / "tokens.toml"
    file.write_text("".join(f'[{scope}]\ntoken = "{each}"\nscopes = ["{scope}"]\n' for scope, each in tokens.items()))
    async with hand_fed(api_tokens_file=file) as (url, fed):
        await fed.hold(Stream("one"), TOKENS)
        page = await opened(browser, url, [])
        await page.locator("#token-field").fill(tokens["decisions"])
        await page.keyboard.press("Enter")
        await wait_for_text(page, "#token [role=alert]", "it lacks the scope read")
        await page.reload()
        await wait_for_text(page, "#token [role=alert]", "it lacks the scope read")
        await page.locator("#token-field").fill(tokens["read"])
        await page.keyboard.press("Enter")
        await wait_for_text(page, "#verdict", "1 of 1 workers live")


async def test_a_filter_without_a_match_leaves_the_models_of_the_ask_box(browser: Browser) -> None:
    async with hand_fed() as (url, fed):
        await fed.hold(Stream("one"), TOKENS)
        page = await opened(browser, url, [])
        await wait_for_text(page, "#workers", "one")
        await page.get_by_label("Show workers whose names contain").fill("zzz")
        await wait_for_text(page, "#workers", "No worker's name contains")
        await page.get_by_label("A prompt").fill(" ".join(map(str, TOKENS)))
        await page.get_by_role("button", name="Ask", exact=True).click()
        await wait_for_text(page, "#ask", "1 worker holds a part of 64 tokens.")


async def test_pages_without_a_prefix_that_is_shown_are_not_denied(browser: Browser) -> None:
    sharing, private, orphan = [Stream("a"), Stream("b")], Stream("private"), Stream("orphan", model="o")
    shared = [stored((0, range(10 * k + 1, 10 * k + 6))) for k in range(400)]
    async with hand_fed() as (url, fed):
        fed.alive += [*sharing, private, orphan]
        await fed.feed(*(each.batch(*shared) for each in sharing))
        await fed.feed(private.batch(stored((0, range(10**6, 10**6 + 7)))), orphan.batch(stored((77, [78, 79, 80]))))
        page = await opened(browser, f"{url}/?{urlencode({'worker': 'private', 'model': 'm'})}", [])
        await wait_for_text(page, "#worker", "It holds 7 pages, but none of the prefixes that the map shows")
        await page.goto(f"{url}/?model=o")
        await page.locator("#residency").scroll_into_view_if_needed()
        await wait_for_text(
            page, "#residency", "3 pages of this model are held, but none from the beginning of a prompt"
        )


async def test_an_empty_fleet_says_what_to_do_next(browser: Browser) -> None:
    faults: list[str] = []
    async with hand_fed() as (url, _):
        page = await opened(browser, url, faults)
        await wait_for_text(page, "#verdict", "No worker yet.")
        await wait_for_text(page, "#workers", "kvsight demo --engine NAME --kafka HOST:PORT")
        await page.locator("#decisions").scroll_into_view_if_needed()
        await wait_for_text(page, "#decisions", "POST /decisions")
        assert faults == []
    await wait_for_text(page, "#verdict", "The service does not answer. Figures below are")


async def test_the_page_is_readable_on_a_telephone_and_every_control_has_a_name(browser: Browser) -> None:
    faults: list[str] = []
    async with hand_fed() as (url, fed):
        for number in range(30):
            await fed.hold(Stream(f"worker-{number}"), [number, *TOKENS])
        page = await opened(browser, url, faults, width=360, height=780, scheme="dark")
        await wait_for_text(page, "#workers", "worker-29")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        assert await page.evaluate(NAMELESS) == []
        assert faults == []
