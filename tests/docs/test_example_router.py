"""The routers of examples/ with small simulated engines and the real API, all on loopback."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from indexer.writing.queue import WriteQueue
from kv_events.decisions import Decision, DecisionRecord, Outcome, decode_decision
from kv_events.records import LogRecord
from tests.support.http_checks import WITHOUT_TLS
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))
OTHER = list(range(101, 117))
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEAD_URL = "http://127.0.0.1:9"
"""An address on which nothing listens."""
both = pytest.mark.parametrize("router", ["router", "small_router"])


def load(router: str, engines: dict[str, str], kvsight: str, **more: str) -> ModuleType:
    """Import the example as uvicorn does. more: environment variables."""
    listed = ",".join(f"{name}={url}" for name, url in engines.items())
    variables = {"ENGINES": listed, "KVSIGHT_URL": kvsight, **more}
    spec = importlib.util.spec_from_file_location(f"example_{router}", EXAMPLES / f"{router}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        spec.loader.exec_module(module)
    return module


@dataclass
class Engine:
    """An engine that computes nothing. A word is one token: its number, else its length."""

    tokenizes: int = 200
    """The status of its answers to /tokenize."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[tuple[str | None, str | None]] = field(default_factory=list)
    """Rank and credentials."""
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0
    ended: int = 0
    """Chunks of endless streams."""

    def app(self) -> Starlette:
        routes = [
            ("/tokenize", self._tokenize),
            ("/v1/completions", self._complete),
            ("/v1/chat/completions", self._chat),
        ]
        posted = [Route(path, handler, methods=["POST"]) for path, handler in routes]
        return Starlette(routes=[*posted, Route("/v1/models", self._models)])

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m"}]})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        text = body["prompt"] if "prompt" in body else " ".join(each["content"] for each in body["messages"])
        if self.tokenizes != 200:
            return JSONResponse({"error": {"code": self.tokenizes}}, self.tokenizes)
        return JSONResponse({"tokens": [int(word) for word in text.split()]})

    async def _complete(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.headers.append((request.headers.get("x-data-parallel-rank"), request.headers.get("authorization")))
        if self.asked[-1].get("slow"):
            await self.may_go_on.wait()
        if self.asked[-1].get("endless"):
            return StreamingResponse(self._endless(), media_type="text/event-stream")
        if self.asked[-1].get("untyped"):
            return Response(b"done")
        if "reused" in self.asked[-1]:
            usage = {"prompt_tokens": 19, "prompt_tokens_details": {"cached_tokens": self.asked[-1]["reused"]}}
            return JSONResponse({"text": "done", "usage": usage})
        return JSONResponse({"text": "done"}, 400 if self.asked[-1].get("bad") else 200)

    async def _endless(self) -> AsyncIterator[bytes]:
        self.begun += 1
        try:
            while True:
                yield b"data: 1\n\n"
                await asyncio.sleep(0.01)
        finally:
            self.ended += 1

    async def _chat(self, request: Request) -> Response:
        self.asked.append(await request.json())

        async def stream() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"data: %d\n\n" % number

        return StreamingResponse(stream(), media_type="text/event-stream")


class Kept:
    """A sink of decisions in memory."""

    def __init__(self) -> None:
        self.records: list[DecisionRecord] = []

    async def write(self, records: Sequence[LogRecord]) -> None:
        self.records += [decode_decision(record.payload) for record in records]


@dataclass
class Rig:
    """All running parts."""

    fed: HandFed
    engines: dict[str, Engine]
    client: httpx.AsyncClient
    """Of the router."""
    module: Any
    """The router."""
    kept: Kept
    """What the router has reported."""

    async def complete(self, tokens: list[int] | str, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "m", "prompt": tokens, **more})


@asynccontextmanager
async def routed(
    router: str = "router", with_api: bool = True, down: Collection[str] = (), **variables: str
) -> AsyncIterator[Rig]:
    """down: engines that cannot be reached. variables: the router's environment."""
    settings, fed, kept = ApiSettings(port=0), HandFed(), Kept()
    engines = {"engine-0": Engine(), "engine-1": Engine()}
    async with AsyncExitStack() as stack:
        urls = {
            name: await stack.enter_async_context(running_server(engine.app(), settings))
            for name, engine in engines.items()
        }
        urls |= dict.fromkeys(down, DEAD_URL)
        api = await stack.enter_async_context(
            running_server(create_app(LiveService(fed.consumer, settings, decisions=WriteQueue(kept.write))), settings)
        )
        example = load(router, urls, api if with_api else DEAD_URL, **variables)
        for client_of_router in (example.http, example.kvsight):
            stack.push_async_callback(client_of_router.aclose)
        address = await stack.enter_async_context(running_server(example.app, settings))
        unlimited = httpx.Limits(max_connections=None)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=address, limits=unlimited, timeout=30, verify=WITHOUT_TLS)
        )
        yield Rig(fed, engines, client, example, kept)


@both
async def test_a_request_goes_where_its_prefix_is(router: str) -> None:
    async with routed(router) as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS)
        await rig.fed.hold(Stream("engine-0"), OTHER)
        for prompt, engine in ((TOKENS, "engine-1"), (OTHER, "engine-0")):
            answer = await rig.complete([*prompt, 7, 8, 9])
            assert (answer.json(), answer.headers["x-worker"]) == ({"text": "done"}, engine)
            assert [each["prompt"] for each in rig.engines[engine].asked] == [[*prompt, 7, 8, 9]]


async def test_a_request_goes_to_the_rank_that_has_its_prefix_with_the_key_of_the_caller() -> None:
    async with routed() as rig:
        await rig.fed.hold(Stream("engine-1", dp_rank=3), TOKENS)
        await rig.fed.hold(Stream("engine-0"), OTHER)
        await rig.complete(TOKENS)
        rig.client.headers["authorization"] = "Bearer of-the-caller"
        await rig.complete(OTHER)
        assert rig.engines["engine-1"].headers == [("3", None)]
        assert rig.engines["engine-0"].headers == [("0", "Bearer of-the-caller")]


@both
async def test_a_chat_is_streamed_from_the_engine_that_holds_it(router: str) -> None:
    async with routed(router) as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS)
        messages = [{"role": "user", "content": " ".join(map(str, TOKENS))}]
        answer = await rig.client.post(
            "/v1/chat/completions", json={"model": "m", "messages": messages, "stream": True}
        )
    assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert (answer.headers["x-worker"], answer.headers["content-type"]) == (
        "engine-1",
        "text/event-stream; charset=utf-8",
    )


@both
async def test_too_much_work_that_waits_sends_a_request_elsewhere(router: str) -> None:
    async with routed(router) as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS)
        busy = rig.engines["engine-1"]
        slow = asyncio.create_task(rig.complete([*TOKENS, *range(1000, 1020)], slow=True))
        await async_wait_until(lambda: busy.asked, what="the slow request")
        assert (await rig.complete(TOKENS)).headers["x-worker"] == "engine-0"
        busy.may_go_on.set()
        assert (await slow).headers["x-worker"] == "engine-1"
        assert (await rig.complete(TOKENS)).headers["x-worker"] == "engine-1"


@both
async def test_answers_are_relayed_as_they_are(router: str) -> None:
    async with routed(router) as rig:
        assert (await rig.complete(TOKENS, bad=True)).status_code == 400
        plain = await rig.complete(TOKENS, untyped=True)
        models = await rig.client.get("/v1/models")
    assert (plain.status_code, plain.content, plain.headers.get("content-type")) == (200, b"done", None)
    assert (models.status_code, models.json()) == (200, {"data": [{"id": "m"}]})


@both
async def test_more_than_a_hundred_requests_are_under_way_at_once(router: str) -> None:
    async with routed(router) as rig:
        slow = [asyncio.create_task(rig.complete(TOKENS, slow=True)) for _ in range(105)]
        asked = [engine.asked for engine in rig.engines.values()]
        await async_wait_until(lambda: sum(map(len, asked)) == 105, what="all requests at the engines")
        for engine in rig.engines.values():
            engine.may_go_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*slow)} == {200}


@both
async def test_the_engine_is_disconnected_when_the_caller_disconnects_even_before_the_answer(router: str) -> None:
    async with routed(router) as rig:
        engine = rig.engines["engine-0"]
        request = {"model": "m", "prompt": TOKENS, "endless": True}
        async with rig.client.stream("POST", "/v1/completions", json=request) as answer:
            assert await anext(answer.aiter_bytes())
            assert (engine.begun, engine.ended) == (1, 0)
        await async_wait_until(lambda: engine.ended, what="the stream is closed")
        engine.asked.clear()
        hasty = asyncio.create_task(rig.complete(TOKENS, slow=True, endless=True))
        await async_wait_until(lambda: engine.asked, what="the request at the engine")
        hasty.cancel()
        await asyncio.wait([hasty])
        engine.may_go_on.set()
        await async_wait_until(lambda: engine.ended == engine.begun == 2, what="the second stream is closed")


@both
async def test_what_was_chosen_and_what_the_engine_reused_is_reported(router: str) -> None:
    async with routed(router) as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS, cache_salt="s")
        await rig.complete([*TOKENS, 7, 8, 9], cache_salt="s", reused=12)
        await async_wait_until(lambda: len(rig.kept.records) == 2, what="the report")
        decision, outcome = rig.kept.records
        assert isinstance(decision, Decision)
        assert isinstance(outcome, Outcome)
        assert (decision.worker, decision.predicted_tokens, decision.prompt_tokens) == ("engine-1", 16, 19)
        assert [(each.worker, each.tokens) for each in decision.candidates] == [("engine-1", 16), ("engine-0", 0)]
        assert len(decision.sequence_hashes) == 8 * 4
        assert (outcome.request_id, outcome.cached_tokens) == (decision.request_id, 12)
        assert decision.timestamp <= outcome.timestamp
        await rig.complete(OTHER)  # an engine that says nothing of its cache
        await async_wait_until(lambda: len(rig.kept.records) == 3, what="the report")
        assert isinstance(rig.kept.records[-1], Decision)


@both
async def test_the_salt_of_a_request_counts(router: str) -> None:
    async with routed(router) as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS, cache_salt="s")
        assert (await rig.complete(TOKENS, cache_salt="s")).headers["x-worker"] == "engine-1"
        assert (await rig.complete(TOKENS)).headers["x-worker"] == "engine-0"


async def test_an_adapter_is_looked_for_among_the_pages_of_its_model() -> None:
    async with routed(ADAPTERS="ad=m,other=m") as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS, lora_name="ad")
        for model, engine in (("ad", "engine-1"), ("other", "engine-0"), ("m", "engine-0")):
            answer = await rig.client.post("/v1/completions", json={"model": model, "prompt": TOKENS})
            assert answer.headers["x-worker"] == engine
            assert rig.engines[engine].asked[-1]["model"] == model


async def test_kvsights_absence_is_logged_and_not_at_every_request(caplog: pytest.LogCaptureFixture) -> None:
    async with routed(with_api=False) as rig:
        for _ in range(5):
            assert (await rig.complete(TOKENS)).status_code == 200
    (said,) = [record for record in caplog.records if record.name == "router"]
    assert (said.levelname, "http://127.0.0.1:9/query" in said.getMessage()) == ("WARNING", True)


@both
@pytest.mark.parametrize("with_api", [True, False])
async def test_requests_are_served_without_kvsight_and_before_any_engine_was_heard(router: str, with_api: bool) -> None:
    async with routed(router, with_api) as rig:
        assert (await rig.complete(TOKENS)).status_code == 200


@both
async def test_an_engine_that_is_down_is_named_and_gets_nothing_for_a_while(router: str) -> None:
    async with routed(router, down={"engine-1"}) as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS)
        failed = await rig.complete([*TOKENS, *range(1000, 1020)])
        assert (failed.status_code, "engine-1 does not answer" in failed.text) == (502, True)
        assert "engine-0" not in failed.text
        for _ in range(3):
            assert (await rig.complete(TOKENS)).headers["x-worker"] == "engine-0"


@both
async def test_an_engine_that_was_down_gets_requests_again_and_its_lost_work_is_forgotten(router: str) -> None:
    async with routed(router, down={"engine-1"}) as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS)
        rig.module.AWAY_S = rig.module.FIRST_AWAY_S = 0.0
        for _ in range(2):  # leftover work of 20 tokens would choose engine-0
            assert (await rig.complete([*TOKENS, *range(1000, 1020)])).status_code == 502
        rig.module.engines["engine-1"] = rig.module.engines["engine-0"]  # another engine at its name
        assert (await rig.complete(TOKENS)).headers["x-worker"] == "engine-1"


async def test_an_engine_that_stays_away_is_left_alone_for_longer_and_longer() -> None:
    async with routed(down={"engine-1"}) as rig:
        away: dict[str, float] = rig.module.away_s
        for expected in (1, 2, 4, 8, 16, 30, 30):
            rig.module.away_until.clear()
            await rig.fed.hold(Stream("engine-1"), TOKENS)
            assert (await rig.complete(TOKENS)).status_code == 502
            assert away == {"engine-1": expected}
        rig.module.away_until.clear()
        rig.module.engines["engine-1"] = rig.module.engines["engine-0"]
        assert (await rig.complete(TOKENS)).headers["x-worker"] == "engine-1"
        assert away == {}


@both
@pytest.mark.parametrize("body", [{"prompt": TOKENS}, {"model": None, "prompt": TOKENS}, {"model": 7, "messages": []}])
async def test_a_body_without_a_model_is_the_callers_mistake(router: str, body: dict[str, Any]) -> None:
    async with routed(router) as rig:
        answer = await rig.client.post("/v1/completions", json=body)
        assert (answer.status_code, "model" in answer.text) == (400, True)
        assert all(not engine.asked for engine in rig.engines.values())


async def test_the_models_are_those_of_any_engine_that_answers() -> None:
    async with routed(down={"engine-0"}) as rig:
        assert (await rig.client.get("/v1/models")).headers["x-worker"] == "engine-1"


@both
async def test_where_no_engine_tokenizes_or_lists_models_the_caller_gets_an_error(router: str) -> None:
    async with routed(router, down={"engine-0", "engine-1"}) as rig:
        answer = await rig.complete("1 2 3")
        assert (await rig.client.get("/v1/models")).status_code == 502
    assert (answer.status_code, "engine-0 does not answer" in answer.text) == (502, True)
    assert ("engine-1 does not answer" in answer.text) == (router == "router")


@pytest.mark.parametrize("down", [{"engine-0"}, ()])
async def test_another_engine_tokenizes_where_one_cannot(down: Collection[str]) -> None:
    async with routed(down=down) as rig:
        rig.engines["engine-0"].tokenizes = 503
        await rig.fed.hold(Stream("engine-1"), TOKENS)
        assert (await rig.complete(" ".join(map(str, TOKENS)))).headers["x-worker"] == "engine-1"
        rig.engines["engine-1"].tokenizes = 500
        answer = await rig.complete("1 2 3")
    assert (answer.status_code, "engine-1 answers 500" in answer.text) == (502, True)


@both
async def test_a_prompt_that_is_not_tokenized_is_refused_by_the_engine_itself(router: str) -> None:
    async with routed(router) as rig:
        rig.engines["engine-0"].tokenizes = 404
        assert (await rig.complete("1 2 3", bad=True)).status_code == 400
