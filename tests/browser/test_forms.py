"""What is typed into the live page, names from outside, tokens, and the documentation of the API, in a real browser."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, Route, expect

from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from tests.support.browser.chromium import DEADLINE_S, asked, shows, text_of, visiting
from tests.support.browser.shown_fleet import hand_fed
from tests.support.log.hand_fed import HandFed
from tests.support.log.late_log import write_log
from tests.support.log.planted_causes import planted
from tests.support.log.planted_scene import VICTIM
from tests.support.log.records import Stream
from tests.support.waiting import async_wait_until

pytestmark = [pytest.mark.timing("a browser must show it within seconds"), pytest.mark.asyncio(loop_scope="module")]

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


async def give_token(page: Page, token: str) -> None:
    await page.locator("#token-field").fill(token)
    await page.keyboard.press("Enter")


async def ask(page: Page, prompt: str) -> None:
    await page.get_by_label("A prompt").fill(prompt)
    await page.get_by_role("button", name="Ask", exact=True).click()


async def test_the_ask_box_shows_what_a_query_returns(browser: Browser) -> None:
    async with hand_fed(browser, "404") as (page, fed):
        await fed.hold(Stream("whole"), TOKENS)
        await fed.hold(Stream("half"), TOKENS, tiers={0: range(4), 1: range(4, 8)})
        await page.goto("/")
        await shows(page, "#workers", "whole")
        body = {"model_name": "m", "token_ids": TOKENS}
        for prompt in (" ".join(map(str, TOKENS)), json.dumps(TOKENS), json.dumps(body)):
            await ask(page, prompt)
            await shows(page, "#ask", "2 workers hold a part of 64 tokens.")
            rows = await page.locator("#ask tbody tr").all_inner_texts()
            held = {
                name: found["longest_matched"]
                for name, found in (await asked(page, "/query", body))["instances"].items()
            }
            for row, name in zip(rows, ("whole", "half"), strict=True):  # cells adjoin before layout
                assert row.startswith(name), rows
                assert f"{held[name]} tokens" in row, rows
        assert "all 16 whole pages" in rows[0]
        assert "ends before page 9 of 16" in rows[1]
        bar = page.locator("#ask tbody tr").nth(1).locator(".tiers")
        assert await bar.get_attribute("aria-label") == "half: 16 tokens on GPU, 16 on CPU of 64"
        await shows(page, "#ask", "start it with --record FOLDER")
        await ask(page, "1 2 3")
        await shows(page, "#ask", "These 3 tokens are less than one page of 4, so that no worker can hold any.")
        await ask(page, "{")
        await shows(page, "#ask [role=alert]", "The request body is not JSON")


async def test_the_ask_box_tells_why_a_prefix_ends(browser: Browser, tmp_path: Path) -> None:
    scene, _ = planted("evicted", 100)
    write_log(tmp_path, scene.records)
    fed, settings = HandFed(), ApiSettings(port=0)
    app = create_app(LiveService(fed.consumer, settings, event_log=tmp_path))
    async with running_server(app, settings) as url, visiting(browser, url) as page:
        await fed.feed(*scene.records)
        await page.goto("/")
        await shows(page, "#workers", VICTIM)
        await ask(page, json.dumps(scene.body))
        await shows(page, "#ask", VICTIM)
        await expect(page.locator("#ask")).not_to_contain_text("Looking for the reasons")
        found, shown = await asked(page, "/explain", scene.body), await text_of(page, "#ask")
        assert found["workers"]
        assert all(worker["findings"][0]["text"] in shown for worker in found["workers"]), (found, shown)


async def test_names_from_outside_are_text(browser: Browser) -> None:
    async with hand_fed(browser) as (page, fed):
        stream = Stream(HOSTILE, model=HOSTILE)
        await fed.hold(stream, TOKENS)
        fed.alive.clear()
        await fed.feed(stream.batch(degraded_reason=HOSTILE))
        await page.goto("/")
        await shows(page, "#workers", HOSTILE)
        await shows(page, "#verdict", HOSTILE)
        await page.locator("#residency").scroll_into_view_if_needed()
        await shows(page, "#residency thead", HOSTILE)
        await page.keyboard.press("Control+Home")
        await page.locator("#workers tbody tr .name").first.click()
        await shows(page, "#worker", HOSTILE)
        assert await page.locator("img, main script, body script").count() == 0
        assert "kvsight" in await page.title()


async def test_names_that_look_like_nothing_or_like_others_are_shown_by_code_points(browser: Browser) -> None:
    async with hand_fed(browser) as (page, fed):
        for worker in UNSEEN:
            await fed.hold(Stream(worker, model="\u2066m"), TOKENS)
        await page.goto("/")
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
        await shows(page, "#worker", "<U+2066>m")
        assert await text_of(page, "#worker-title") == "<U+FEFF>w"


async def has_texts(found: Locator, texts: list[str]) -> bool:
    return sorted(await found.all_inner_texts()) == texts


async def test_the_page_asks_for_the_token_and_keeps_it_in_the_tab(browser: Browser) -> None:
    async with hand_fed(browser, "401", api_token="s3cret") as (page, fed):
        await fed.hold(Stream("one"), TOKENS)
        await page.goto("/")
        await give_token(page, "wrong")
        await shows(page, "#token [role=alert]", "does not know this token")
        await give_token(page, "s3cret\N{RIGHT SINGLE QUOTATION MARK}")  # no header can carry it
        assert await page.locator("#token-field:invalid").count() == 1
        await give_token(page, "s3cret")
        await shows(page, "#verdict", "1 of 1 workers live")
        await page.reload()
        await shows(page, "#verdict", "1 of 1 workers live")
        assert await page.evaluate("localStorage.length + document.cookie.length") == 0


async def test_a_token_that_cannot_read_is_asked_for_again(browser: Browser, tmp_path: Path) -> None:
    tokens = {scope: f"token-of-{scope}-0123456789" for scope in ("decisions", "read")}
    file = tmp_path / "tokens.toml"
    file.write_text("".join(f'[{scope}]\ntoken = "{each}"\nscopes = ["{scope}"]\n' for scope, each in tokens.items()))
    async with hand_fed(browser, "40", api_tokens_file=file) as (page, fed):
        await fed.hold(Stream("one"), TOKENS)
        await page.goto("/")
        await give_token(page, tokens["decisions"])
        await shows(page, "#token [role=alert]", "it lacks the scope read")
        await page.reload()
        await shows(page, "#token [role=alert]", "it lacks the scope read")
        await give_token(page, tokens["read"])
        await shows(page, "#verdict", "1 of 1 workers live")


async def test_a_late_refusal_says_nothing_about_the_token_that_was_given_since(browser: Browser) -> None:
    given = asyncio.Event()

    async def late(route: Route) -> None:
        answer = await route.fetch()
        await given.wait()
        await route.fulfill(response=answer)

    async with hand_fed(browser, "401", api_token="s3cret") as (page, fed):
        await fed.hold(Stream("one"), TOKENS)
        await page.route("**/residency?*", late)
        await page.goto("/")
        async with page.expect_response("**/residency?*") as refusal:
            await give_token(page, "s3cret")
            await shows(page, "#verdict", "1 of 1 workers live")
            given.set()
        assert (await refusal.value).status == 401
        await shows(page, "#residency", "one")
        assert await page.locator("#token").is_hidden()


async def test_a_filter_without_a_match_leaves_the_models_of_the_ask_box(browser: Browser) -> None:
    async with hand_fed(browser, "404") as (page, fed):
        await fed.hold(Stream("one"), TOKENS)
        await page.goto("/")
        await shows(page, "#workers", "one")
        await page.get_by_label("Show workers whose names contain").fill("zzz")
        await shows(page, "#workers", "No worker's name contains")
        await ask(page, " ".join(map(str, TOKENS)))
        await shows(page, "#ask", "1 worker holds a part of 64 tokens.")
        await fed.hold(Stream("late", model="n"), TOKENS)  # the page does not know its page size
        await ask(page, json.dumps({"model_name": "n", "token_ids": [8, 9]}))
        await shows(page, "#ask", "No worker holds the first page of these 2 tokens.")


async def test_the_documentation_shows_every_route_and_asks_for_the_token(browser: Browser) -> None:
    settings = ApiSettings(port=0, api_token="s3cret")
    app = create_app(LiveService(HandFed().consumer, settings))
    async with running_server(app, settings) as url, visiting(browser, url) as page:
        await page.goto("/docs")
        await page.wait_for_selector("button.btn.authorize")
        await page.wait_for_selector("[data-path='/health']")
        paths = await page.eval_on_selector_all("[data-path]", "all => all.map(each => each.dataset.path)")
    assert {path.replace("\u200b", "") for path in paths} == set(app.openapi()["paths"])


async def test_the_page_is_readable_on_a_telephone_and_every_control_has_a_name(browser: Browser) -> None:
    async with hand_fed(browser, view={"width": 360, "height": 780, "scheme": "dark"}) as (page, fed):
        for number in range(30):
            await fed.hold(Stream(f"worker-{number}"), [number, *TOKENS])
        await page.goto("/")
        await shows(page, "#workers", "worker-29")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        assert await page.evaluate(NAMELESS) == []
