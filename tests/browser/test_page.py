"""The live page in a real browser."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.async_api import Browser, expect

from api.settings import ApiSettings
from kv_events.schema import CLOSED
from tests.support.browser.chromium import DEADLINE_S, asked, shows, text_of, visiting
from tests.support.browser.shown_fleet import hand_fed, shown_fleet
from tests.support.log.records import Stream, removed, stored
from tests.support.waiting import async_wait_until

pytestmark = [pytest.mark.timing("a browser must show it within seconds"), pytest.mark.asyncio(loop_scope="module")]

TOKENS = list(range(1, 65))
OVERLAP = """
row => row.querySelector('.prefix').getBoundingClientRect().right - row.querySelector('td').getBoundingClientRect().left
"""

BESIDE = """
labels => labels.map(each => {
  const [label, figure] = [each, each.nextElementSibling.nextElementSibling].map(one => one.getBoundingClientRect());
  return label.top < figure.bottom && figure.top < label.bottom && label.right <= figure.left;
})
"""

ENDS_SHOWN = """
names => names.map(each => each.firstChild.getBoundingClientRect().right <= each.getBoundingClientRect().right + 1)
"""


async def test_the_page_opens_while_somebody_holds_all_connections(browser: Browser) -> None:
    async with hand_fed(browser, max_connections=100) as (page, fed), AsyncExitStack() as held:
        await fed.hold(Stream("w"), TOKENS)
        for _ in range(400):
            _, writer = await asyncio.open_connection(*fed.url.removeprefix("http://").split(":"))
            held.callback(writer.close)
        await page.goto("/")
        await shows(page, "#workers tbody tr .name", "w")


async def test_the_page_shows_every_worker_of_a_fleet_and_what_it_holds(browser: Browser) -> None:
    async with shown_fleet(ApiSettings(port=0)) as shown, visiting(browser, shown.url) as page:
        await page.goto("/")
        await shows(page, "#verdict", "3 of 3 workers live. Views equal what the engines reported as of")
        names = [f"worker-{number}" for number in range(3)]
        assert await page.locator("#workers tbody tr .name").all_inner_texts() == names
        fleet = await asked(page, "/fleet")
        bars = page.locator("#workers tbody .tiers")
        for number, worker in enumerate(fleet["workers"]):
            label = await bars.nth(number).get_attribute("aria-label")
            assert f"{worker['pages']['GPU']:,} of 512 pages on GPU" in str(label), (label, worker["pages"])
        await page.locator("#residency").scroll_into_view_if_needed()
        await shows(page, "#residency thead", "worker-2")
        residency = await asked(page, "/residency")
        row = page.locator("#residency tbody tr").first
        assert await row.evaluate(OVERLAP) <= 0
        assert (await row.locator("code").inner_text()) == residency["rows"][0]["hash"][:8]
        assert f"{residency['rows'][0]['pages']:,} page" in await row.inner_text()
        await page.locator("#decisions").scroll_into_view_if_needed()
        await shows(page, "#decisions", "60 requests in the last hour, 60 with an outcome")
        await page.set_viewport_size({"width": 360, "height": 900})
        assert await page.locator(".funnel dt").evaluate_all(BESIDE) == [True] * 4
        await page.set_viewport_size({"width": 1280, "height": 900})
        await page.keyboard.press("Control+Home")
        await page.locator("#workers tbody tr .name").first.focus()
        await page.keyboard.press("Enter")
        await shows(page, "#worker", "Hottest prefixes")
        await shows(page, "#worker", "in the last")
        assert "worker=worker-0" in page.url
        await page.go_back()
        await shows(page, "#workers", "worker-2")


async def test_the_page_begins_with_routing_quality_and_explains_a_loss(browser: Browser) -> None:
    async with hand_fed(browser, "404") as (page, fed):
        await fed.hold(Stream("w"), TOKENS)
        await page.goto("/")
        await shows(page, "#workers", "w")
        assert await page.locator("#quality h2").is_hidden()  # nothing was reported
        decision = {"model_name": "m", "token_ids": TOKENS, "worker": "w", "request_id": "r", "predicted_tokens": 64}
        await asked(page, "/decisions", {"decisions": [decision, {"request_id": "r", "cached_tokens": 16}]})
        await page.reload()
        await shows(page, "#quality .facts", "Hit rate now")
        facts = (await text_of(page, "#quality .facts")).split("\n")
        shown = dict(zip(facts[::2], facts[1::2], strict=True))
        assert (shown["Hit rate now"], shown["An hour ago"], shown["Tokens saved"]) == ("25%", "no request", "16")
        assert (shown["Lost in engines (1h)"], shown.get("Held by nobody")) == ("48", None)  # candidates are unknown
        assert (await page.locator("#quality .heights span").all_inner_texts()) == ["100%", "50%", "0%"]
        before = await page.locator("#quality .times span").all_inner_texts()
        await page.locator("#quality select").select_option("Last 24 hours")
        await expect(page.locator("#quality .times span")).not_to_have_text(before)
        assert "range=86400" in page.url
        assert "An hour ago\nno request" in await text_of(page, "#quality .facts")  # a step has 24 minutes
        await page.locator("#quality").get_by_role("link", name="explain").click()
        await shows(page, "#ask", "Request r: the engine delivered less than predicted. What w held:")
        await shows(page, "#ask", "start it with --record FOLDER")


async def test_the_page_follows_a_gap_a_resync_and_a_worker_that_leaves(browser: Browser) -> None:
    good, broken = Stream("good"), Stream("broken")
    async with hand_fed(browser) as (page, fed):
        await fed.hold(good, TOKENS)
        hashes = await fed.hold(broken, TOKENS)
        await page.goto("/")
        await shows(page, "#verdict", "2 of 2 workers live")
        broken.batch(removed(hashes[:1]))
        await fed.feed(broken.batch(removed(hashes[1:2])))
        await shows(page, "#verdict", "broken stale since")
        await shows(page, "#verdict", "1 batch lost")
        assert (await page.locator("#workers tbody tr .name").all_inner_texts())[0] == "broken"
        time = page.locator("#verdict time")
        assert str(await time.get_attribute("title")).endswith(" UTC")
        await fed.feed(broken.resync())
        await shows(page, "#verdict", "2 of 2 workers live")
        fed.alive.remove(broken)
        await fed.feed(broken.batch(degraded_reason="closed"))
        await shows(page, "#verdict", "broken left at")
        await shows(page, "#workers", "left")


async def test_rows_stay_where_they_are_while_somebody_reads(browser: Browser) -> None:
    streams = [Stream(f"worker-{number}") for number in range(40)]
    async with hand_fed(browser) as (page, fed):
        for stream in streams:
            await fed.hold(stream, TOKENS)
        await page.goto("/")
        names = page.locator("#workers .tile .name")
        await shows(page, "#workers", "worker-39")
        before = await names.all_inner_texts()
        await page.mouse.wheel(0, 600)
        await async_wait_until(lambda: page.evaluate("scrollY > 100"), DEADLINE_S)
        fed.alive.remove(streams[30])
        await fed.feed(streams[30].batch(degraded_reason="engine not heard"))
        await shows(page, "#held", "Catch up")
        assert await names.all_inner_texts() == before
        await page.get_by_role("button", name="Catch up").click()
        await expect(names.first).to_have_text("worker-30")


async def test_a_large_fleet_is_a_sorted_grid_after_its_totals(browser: Browser) -> None:
    async with hand_fed(browser) as (page, fed):
        for number in range(31):
            name = f"vllm-llama-3-70b-decode-7f9c8d6b54-{number}.inference.svc.cluster.local"
            await fed.hold(Stream(name), range(1, 5 + 4 * (number == 7)))
        await page.goto("/")
        await shows(page, "#workers .facts", "31")
        totals = await text_of(page, "#workers .facts")
        assert ("Pages held\n32" in totals, "Room for\nnot known" in totals) == (True, True), totals
        tiles = page.locator("#workers .tile")
        assert await tiles.count() == 31
        heights = await tiles.locator(".name").evaluate_all("names => names.map((name) => name.clientHeight)")
        assert max(heights) < 30  # one line each
        assert all(await tiles.locator(".name").evaluate_all(ENDS_SHOWN))
        await page.locator("#workers select").select_option("most pages first")
        await expect(tiles.locator(".name").first).to_have_text(name.replace("-30.", "-7."))
        assert "order=held" in page.url
        await tiles.first.click()
        await shows(page, "#worker", "Its room is not known")


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
    leaving = Stream("m-2")
    async with hand_fed(browser, view={"height": 500}) as (page, fed):
        await fed.hold(Stream("m-1"), TOKENS)
        await fed.hold(leaving, TOKENS)
        others = await fed.hold(leaving, list(range(500, 540)))
        await page.goto("/")
        await page.locator("#residency").scroll_into_view_if_needed()
        await shows(page, "#residency thead", "m-2")
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


async def test_columns_of_the_map_do_not_show_the_port_that_all_workers_have(browser: Browser) -> None:
    async with hand_fed(browser) as (page, fed):
        for name in ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.1.2:8000"):
            await fed.hold(Stream(name), TOKENS)
        await page.goto("/")
        await page.locator("#residency").scroll_into_view_if_needed()
        heads = page.locator("#residency thead bdi")
        await expect(heads).to_have_text(["10.0.0.1", "10.0.0.2", "10.0.1.2"])
        await fed.hold(Stream("10.0.0.3:8001"), TOKENS)
        await expect(heads).to_have_text(["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8001", "10.0.1.2:8000"])


async def test_a_service_that_hangs_is_not_green(browser: Browser) -> None:
    async with hand_fed(browser) as (page, fed):
        await fed.hold(Stream("one"), TOKENS)
        await page.goto("/")
        await shows(page, "#verdict", "1 of 1 workers live")
        await page.route("**/fleet*", lambda _: None)  # which is never answered
        await shows(page, "#verdict", "The service does not answer. Figures below are")
        await page.unroute("**/fleet*")
        await shows(page, "#verdict", "1 of 1 workers live")


async def test_one_worker_shows_its_batches_as_they_arrive(browser: Browser) -> None:
    stream = Stream("one/a b", model="m")
    async with hand_fed(browser) as (page, fed):
        await fed.hold(stream, TOKENS)
        fed.alive.clear()  # a heartbeat is a batch, too
        await page.goto(f"/?{urlencode({'worker': 'one/a b', 'model': 'm'})}")
        await shows(page, "#worker", "Waiting for the next batch.")
        await shows(page, "#worker", "joined")
        await expect(page.locator("#worker [data-label=Batch]")).to_have_text("0")  # no epoch: scripts would round it

        async def is_shown() -> bool:  # the page may not listen yet
            await fed.feed(stream.batch(stored((0, [stream.seq + 1000, stream.seq + 2000]))))
            return "2 pages" in await text_of(page, "#worker")

        await async_wait_until(is_shown, DEADLINE_S, "a batch of two pages")
        await page.get_by_role("button", name="Ask for a resync").click()
        await shows(page, "#worker", "Asked 1 stream at")
        await async_wait_until(lambda: fed.consumer.resyncs.requested, DEADLINE_S, "the request")


async def test_pages_without_a_prefix_that_is_shown_are_not_denied(browser: Browser) -> None:
    sharing, private, orphan = [Stream("a"), Stream("b")], Stream("private"), Stream("orphan", model="o")
    shared = [stored((0, range(10 * k + 1, 10 * k + 6))) for k in range(400)]
    async with hand_fed(browser) as (page, fed):
        fed.alive += [*sharing, private, orphan]
        await fed.feed(*(each.batch(*shared) for each in sharing))
        await fed.feed(private.batch(stored((0, range(10**6, 10**6 + 7)))), orphan.batch(stored((77, [78, 79, 80]))))
        await page.goto(f"/?{urlencode({'worker': 'private', 'model': 'm'})}")
        await shows(page, "#worker", "It holds 7 pages, but none of the prefixes that the map shows")
        await page.goto("/?model=o")
        await page.locator("#residency").scroll_into_view_if_needed()
        await shows(page, "#residency", "3 pages of this model are held, but none from the beginning of a prompt")


async def test_an_empty_fleet_says_what_to_do_next(browser: Browser) -> None:
    async with hand_fed(browser) as (page, _):
        await page.goto("/")
        await shows(page, "#verdict", "No worker is known")
        await shows(page, "#workers", "let an engine or kvsight bridge publish to the log")
        await page.locator("#decisions").scroll_into_view_if_needed()
        await shows(page, "#decisions", "POST /decisions")
    await shows(page, "#verdict", "The service does not answer. Figures below are")


async def test_a_dead_worker_has_a_cause_and_a_remedy_and_is_forgotten_by_a_button(browser: Browser) -> None:
    stream = Stream("dead")
    async with hand_fed(browser) as (page, fed):
        await fed.hold(stream, TOKENS)
        fed.alive.clear()
        await fed.feed(stream.batch(degraded_reason=CLOSED))
        await page.goto(f"/?{urlencode({'worker': 'dead', 'model': 'm'})}")
        await shows(page, "#worker", "Nothing, if its publisher was stopped on purpose.")
        assert not await page.get_by_role("button", name="Ask for a resync").is_visible()
        page.on("dialog", lambda dialog: dialog.accept())
        await page.get_by_role("button", name="Forget").click()
        await shows(page, "#verdict", "No worker is known")
