"""Prompts as text: whom the service asks, what it says if nobody answers, and that it never waits for long."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import xxhash
from aiohttp import web
from aiohttp.test_utils import TestServer

from api.problems import ProblemError
from api.prompts.renderer import PromptRenderer
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from kv_events.hashing import rolling_hashes
from tests.engines.chat_model import trained_tokenizer
from tests.rigs.api import Serving
from tests.support.http_checks import check_problem
from tests.support.log.records import Stream, stored
from tests.support.waiting import async_wait_until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
ANTHROPIC = {**CHAT, "system": "be kind"}
PROMPT = {"model": "m", "prompt": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
MISSING = 404, {"detail": "Not Found"}
DISABLED = 403, {"error": {"message": "Scale-out endpoints are disabled."}}
CHATS, TEXTS, TOKENIZE = "/v1/chat/completions/render", "/v1/completions/render", "/tokenize"
TOKENS = list(range(1, 17))


class FakeEngine:
    """Answers by path with status and body, and remembers what it was asked."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.answers = answers or {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.num_waiting = self.most_waiting = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        try:
            await self.may_answer.wait()
        finally:
            self.num_waiting -= 1
        status, answer = self.answers.get(request.path, MISSING)
        return web.Response(body=answer if isinstance(answer, bytes) else json.dumps(answer).encode(), status=status)


@asynccontextmanager
async def rendering(engine: FakeEngine, **settings: Any) -> AsyncIterator[PromptRenderer]:
    app = web.Application()
    app.router.add_post("/{path:.*}", engine.answer)
    async with TestServer(app) as server:
        engine.url = str(server.make_url("/"))
        given: dict[str, Any] = {"tokenize_url": engine.url, "tokenize_timeout_s": 20} | settings
        renderer = PromptRenderer(ApiSettings(**given))
        async with aclosing(renderer):
            yield renderer


def rendered(*tokens: int, **features: Any) -> tuple[int, dict[str, Any]]:
    return 200, {"token_ids": tokens, "features": features or None, "sampling_params": {}}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (CHAT, "/v1/chat/completions/render"),
        ({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, "/v1/chat/completions/render"),
        (ANTHROPIC, "/v1/messages/render"),
        ({**CHAT, "tools": [{"name": "f", "input_schema": {}}]}, "/v1/messages/render"),
        ({**CHAT, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "/v1/messages/render"),
        (PROMPT, "/v1/completions/render"),
        ({"model": "m", "input": "hello"}, "/v1/responses/render"),
    ],
)
async def test_each_body_goes_as_it_is_to_the_engines_route_for_it(body: dict[str, Any], path: str) -> None:
    engine = FakeEngine()
    async with rendering(engine) as renderer:
        await renderer.render(body)
    assert engine.asked[0] == (path, {**body, "mm_payload": "none"})


async def test_an_engine_without_render_routes_tokenizes_what_is_plain_text() -> None:
    for refusal in (MISSING, DISABLED):
        engine = FakeEngine({TOKENIZE: (200, {"tokens": [1, 2], "count": 2}), CHATS: refusal, TEXTS: refusal})
        async with rendering(engine) as renderer:
            for body in (CHAT, PROMPT):
                assert (await renderer.render(body)).token_ids.tolist() == [1, 2]
            with_image = {**CHAT, "messages": [{"role": "user", "content": [IMAGE]}]}
            for body in (ANTHROPIC, with_image, {**CHAT, "reasoning_effort": "low"}, {"model": "m", "input": "hello"}):
                assert "--enable-scale-out" in (await renderer.render(body)).degraded


async def test_an_unknown_model_is_no_missing_route() -> None:
    engine = FakeEngine({CHATS: (404, {"error": {"message": "no model m"}}), TOKENIZE: (200, {"tokens": [1]})})
    async with rendering(engine) as renderer:
        assert "no model m" in (await renderer.render(CHAT)).degraded


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((500, {"error": "broken"}), "status 500"),
        ((200, b"no JSON"), "cannot be read"),
        (rendered(-1), "cannot be read"),
        ((200, [{"token_ids": [1]}, {"token_ids": [2]}]), "cannot be read: Expected `array` of length <= 1"),
        ((200, []), "cannot be read: Expected `array` of length >= 1"),
        ((200, {"token_ids": 5}), "cannot be read: Expected `array`, got `int` - at `$.token_ids`"),
        (rendered(1, mm_hashes={"image": ["a"]}, mm_placeholders={"image": []}), "each of 1 hashes of image, got 0"),
        (rendered(1, mm_hashes={"image": ["a"]}, mm_placeholders={}), "each of 1 hashes of image, got 0"),
        ((200, b"[" * 10_000), "cannot be read"),
        (rendered(1, mm_hashes={"image": ["a"]}, mm_placeholders={"image": [{"offset": 0, "length": 2}]}), "longer"),
    ],
)
async def test_a_failure_is_a_reason_and_is_not_kept(answer: Any, reason: str) -> None:
    engine = FakeEngine({CHATS: answer})
    async with rendering(engine) as renderer:
        found = await renderer.render(CHAT)
        assert reason in found.degraded
        assert not len(found.token_ids)
        engine.answers[CHATS] = rendered(5)
        assert (await renderer.render(CHAT)).token_ids.tolist() == [5]


async def test_a_body_that_was_rendered_lately_needs_no_engine() -> None:
    engine = FakeEngine({CHATS: rendered(1, 2)})
    async with rendering(engine) as renderer:
        first, again = await renderer.render(CHAT), await renderer.render(json.loads(json.dumps(CHAT)))
        assert first.token_ids is again.token_ids
        await renderer.render({**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "hi"}]})
    assert len(engine.asked) == 2


async def test_the_cache_is_bounded_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine({TEXTS: rendered(1)})
    async with rendering(engine) as renderer:
        for number in range(300):
            await renderer.render({**PROMPT, "prompt": str(number)})
        await renderer.render({**PROMPT, "prompt": "299"})
        assert len(engine.asked) == 300
        await renderer.render({**PROMPT, "prompt": "0"})
        assert len(engine.asked) == 301
        now = time.monotonic()
        monkeypatch.setattr("api.prompts.renderer.time.monotonic", lambda: now + 61)
        await renderer.render({**PROMPT, "prompt": "299"})
        assert len(engine.asked) == 302


async def test_a_silent_engine_costs_the_deadline_and_no_more() -> None:
    engine = FakeEngine({CHATS: rendered(1)})
    engine.may_answer.clear()
    async with rendering(engine, tokenize_timeout_s=0.05, tokenize_at_once=2) as renderer:
        bodies = [{**CHAT, "user": str(number)} for number in range(20)]
        found = await asyncio.wait_for(asyncio.gather(*map(renderer.render, bodies)), 10)
        assert {each.degraded for each in found} == {"the tokenizer: no answer within 0.05 s"}
        assert engine.most_waiting <= 2
        engine.may_answer.set()
        await async_wait_until(lambda: engine.num_waiting == 0, what="the engine to be idle")
        assert engine.most_waiting <= 2


async def test_nobody_listening_is_a_reason() -> None:
    renderer = PromptRenderer(ApiSettings(tokenize_url="http://127.0.0.1:9", tokenize_timeout_s=20))
    async with aclosing(renderer):
        assert (await renderer.render(CHAT)).degraded.startswith("the tokenizer: ")
    assert "--tokenize-url" in (await PromptRenderer(ApiSettings()).render(CHAT)).degraded


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "m"}, "messages, prompt or input"),
        ({**CHAT, **PROMPT}, "messages and prompt"),
        ({**CHAT, "prompt": TOKENS}, "messages and prompt"),
        ({"model": "m", "prompt": TOKENS, "input": "hello"}, "prompt and input"),
        ({"messages": CHAT["messages"]}, "model"),
        ({"model": "m", "messages": "hello"}, "messages"),
        ({"model": "m", "messages": [{}, "hello"]}, "messages[1]"),
        ({"model": "m", "prompt": ["a", "b"]}, "len(prompt)"),
        ({"model": "m", "prompt": [1, -1]}, "prompt"),
        ({"model": "m", "prompt": [1, 2**32]}, "prompt"),
    ],
)
async def test_a_malformed_body_is_refused(body: dict[str, Any], field: str) -> None:
    with pytest.raises(ProblemError) as caught:
        await PromptRenderer(ApiSettings()).render(body)
    assert caught.value.status == 422
    assert str(caught.value.field).startswith(field)


async def test_tokens_need_nobody() -> None:
    found = await PromptRenderer(ApiSettings()).render({"model": "m", "prompt": TOKENS})
    assert found.token_ids.tolist() == TOKENS


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizer = trained_tokenizer()
    tokenizer.enable_truncation(3)  # as some files do; an engine ignores it
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


async def test_plain_text_is_tokenized_here_if_there_is_a_file(tokenizer_file: Path) -> None:
    engine = FakeEngine({CHATS: rendered(7)})
    text = "hello the engine of the city. " * 20
    async with rendering(engine, tokenizer_file=tokenizer_file) as renderer:
        found = await renderer.render({"model": "m", "prompt": text})
        assert found.token_ids.tolist() == trained_tokenizer().encode(text).ids
        assert not engine.asked
        assert (await renderer.render(CHAT)).token_ids.tolist() == [7]


async def test_a_long_text_that_is_tokenized_here_does_not_stop_the_loop(tokenizer_file: Path) -> None:
    renderer = PromptRenderer(ApiSettings(tokenizer_file=tokenizer_file, tokenize_timeout_s=60))
    task = asyncio.create_task(renderer.render({"model": "m", "prompt": "hello the engine of the city. " * 50_000}))
    began = last = time.monotonic()
    longest = 0.0
    while not task.done():
        await asyncio.sleep(0)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert len(task.result().token_ids) > 300_000
    assert longest < (last - began) / 2


def test_a_file_that_is_no_tokenizer_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    for name in ("no.json", "missing.json"):
        with pytest.raises(InvalidValueError, match="--tokenizer-file"):
            PromptRenderer(ApiSettings(tokenizer_file=tmp_path / name))


@pytest.mark.parametrize("url", ["http://", "http://a b", "http://[::1", "http://user:secret@host"])
def test_an_address_that_is_none_stops_the_start(url: str) -> None:
    with pytest.raises(InvalidValueError, match="--tokenize-url") as refusal:
        ApiSettings(tokenize_url=url)
    assert "secret" not in str(refusal.value)


async def test_a_query_with_text_is_answered_like_one_with_its_tokens(serving: Serving) -> None:
    engine = FakeEngine({CHATS: rendered(*TOKENS)})
    async with rendering(engine), serving(tokenize_url=engine.url, tokenize_timeout_s=20) as (client, fed):
        await fed.hold(Stream("one"), TOKENS)
        by_tokens = {"token_ids": TOKENS, "tier_weights": [1, 1, 1, 1]}
        for names in ({"model_name": "m"}, {"model": "m", "block_size": 4}):
            expected = (await client.post("/query", json={**names, **by_tokens})).json()
            asked = {**CHAT, **names, "tier_weights": [1, 1, 1, 1]}
            got = (await client.post("/query", json=asked)).json()
            assert without_ages(got) == without_ages(expected)
        assert (await client.post("/query", json=CHAT)).json()["instances"]["one"]["gpu"] == len(TOKENS)
        packed = msgspec.msgpack.encode(CHAT)
        answer = await client.post("/query", content=packed, headers={"content-type": "application/msgpack"})
        assert answer.json()["instances"]["one"]["gpu"] == len(TOKENS)
        both = await client.post("/query", json={**CHAT, "model_name": "m", "token_ids": TOKENS[:8]})
        assert both.json()["instances"]["one"]["gpu"] == 8


async def test_media_are_part_of_the_pages(serving: Serving) -> None:
    """The hash of a page with media, computed from the rule in docs/hashing.md."""
    picture, tokens = "ab" * 32, np.arange(1, 17, dtype="<u4")
    extra = {
        0: [],
        1: [int(picture[:16], 16)],
        2: sorted([int(picture[:16], 16), name_hash("cat")]),
        3: [name_hash("cat")],
    }
    local = [
        xxhash.xxh3_64_intdigest(tokens[4 * page :][:4].tobytes() + np.array(objects, "<u8").tobytes(), seed=1337)
        for page, objects in extra.items()
    ]
    features = {
        "mm_hashes": {"audio": ["cat"], "image": [picture]},
        "mm_placeholders": {"audio": [{"offset": 11, "length": 2}], "image": [{"offset": 7, "length": 2}]},
    }
    media = [{"hash": picture, "offset": 7, "length": 2}, {"hash": "cat", "offset": 11, "length": 2}]
    engine = FakeEngine({CHATS: rendered(*TOKENS, **features)})
    async with rendering(engine), serving(tokenize_url=engine.url, tokenize_timeout_s=20) as (client, fed):
        await fed.feed(Stream("one").batch(stored((0, rolling_hashes(local).tolist()))))
        for body in (CHAT, {"model_name": "m", "token_ids": TOKENS, "media": media}):
            assert (await client.post("/query", json=body)).json()["instances"]["one"]["gpu"] == 16
        other = [media[0]], [{**media[0], "offset": 8}, media[1]], [media[0], {**media[1], "hash": "dog"}]
        for spans, reach in zip(other, (8, 4, 8), strict=True):
            body = {"model_name": "m", "token_ids": TOKENS, "media": spans}
            assert (await client.post("/query", json=body)).json()["instances"]["one"]["gpu"] == reach
        too_long = {"model_name": "m", "token_ids": TOKENS, "media": [{**media[0], "length": 17}]}
        check_problem(await client.post("/query", json=too_long), 422, field="media")


def name_hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(name))


async def test_values_of_any_type_and_size_get_an_answer(serving: Serving) -> None:
    large, message = 10**30, {"role": "user", "content": "hi"}
    parts: list[dict[str, Any]] = [{"content": [{"type": {}}]}, {"content": [{"type": [1]}]}, {"number": large}]
    engine = FakeEngine({CHATS: rendered(*TOKENS)})
    async with rendering(engine), serving(tokenize_url=engine.url, tokenize_timeout_s=20) as (client, fed):
        await fed.hold(Stream("one"), TOKENS)
        for odd in parts:
            for path in ("/query", "/select"):
                answer = await client.post(path, json={**CHAT, "messages": [message | odd]})
                assert answer.status_code == 200, answer.text
        for path, field in (("/query", "model_name"), ("/select", "model_name"), ("/select", "session_id")):
            check_problem(await client.post(path, json={**CHAT, field: large}), 422, field=field)
        assert "missing" in check_problem(await client.post("/query", json={"prompt": "a"}), 422)["detail"]


async def test_a_query_says_why_its_text_has_no_tokens(serving: Serving, client: httpx.AsyncClient) -> None:
    check_problem(await client.post("/query", json=CHAT), 404)
    engine = FakeEngine({CHATS: (500, {})})
    async with rendering(engine), serving(tokenize_url=engine.url, tokenize_timeout_s=20) as (other, _):
        assert "status 500" in check_problem(await other.post("/query", json=CHAT), 503)["detail"]
        check_problem(await other.post("/query", json={"model": "m", "messages": 5}), 422)
        check_problem(await other.post("/query", json={**CHAT, "tier_weights": 5}), 422, field="tier_weights")
        for text in (
            b'{"model": "m", "messages": "\xff"}',
            b'{"model": "m", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        ):
            check_problem(await other.post("/query", content=text, headers={"content-type": "application/json"}), 400)
        assert 'kvsight_texts_total{outcome="failed"} 1.0' in (await other.get("/metrics")).text
        large = {**CHAT, "user": "x" * (8 * 2**20)}
        assert "at most 8388608" in check_problem(await other.post("/query", json=large), 422)["detail"]


def without_ages(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {name: without_ages(value) for name, value in answer.items() if name != "age_ms"}
    return answer
