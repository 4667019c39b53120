"""examples/router.py between tiny engines and the real API, all on loopback."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from hand_fed import HandFed
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import async_wait_until
from wire import Stream

from api.app import create_app
from api.server import running_server
from api.settings import ApiSettings

TOKENS = list(range(1, 17))
OTHER = list(range(101, 117))
ROUTER = Path(__file__).resolve().parents[2] / "examples" / "router.py"


def load(engines: dict[str, str], kvsight: str) -> ModuleType:
    """The example as uvicorn would import it."""
    variables = {"ENGINES": ",".join(f"{name}={url}" for name, url in engines.items()), "KVSIGHT_URL": kvsight}
    spec = importlib.util.spec_from_file_location("example_router", ROUTER)
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

    asked: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[str | None] = field(default_factory=list)
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> Starlette:
        routes = [
            ("/tokenize", self._tokenize),
            ("/v1/completions", self._complete),
            ("/v1/chat/completions", self._chat),
        ]
        return Starlette(routes=[Route(path, handler, methods=["POST"]) for path, handler in routes])

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        text = body["prompt"] if "prompt" in body else " ".join(each["content"] for each in body["messages"])
        return JSONResponse({"tokens": [int(word) for word in text.split()]})

    async def _complete(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.ranks.append(request.headers.get("x-data-parallel-rank"))
        if self.asked[-1].get("slow"):
            await self.may_go_on.wait()
        return JSONResponse({"text": "done"}, 400 if self.asked[-1].get("bad") else 200)

    async def _chat(self, request: Request) -> Response:
        self.asked.append(await request.json())

        async def stream() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"data: %d\n\n" % number

        return StreamingResponse(stream(), media_type="text/event-stream")


@dataclass
class Rig:
    """Everything that runs."""

    fed: HandFed
    engines: dict[str, Engine]
    client: httpx.AsyncClient
    """Of the router."""

    async def complete(self, tokens: list[int] | str, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "m", "prompt": tokens, **more})


@asynccontextmanager
async def routed(with_api: bool = True) -> AsyncIterator[Rig]:
    settings, fed = ApiSettings(port=0), HandFed()
    engines = {"engine-0": Engine(), "engine-1": Engine()}
    async with AsyncExitStack() as stack:
        urls = {
            name: await stack.enter_async_context(running_server(engine.app(), settings))
            for name, engine in engines.items()
        }
        api = await stack.enter_async_context(running_server(create_app(fed.consumer, settings), settings))
        example = load(urls, api if with_api else "http://127.0.0.1:9")
        router = await stack.enter_async_context(running_server(example.app, settings))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=router))
        yield Rig(fed, engines, client)


async def test_a_request_goes_where_its_prefix_is() -> None:
    async with routed() as rig:
        await rig.fed.hold(Stream("engine-1", dp_rank=3), TOKENS)
        await rig.fed.hold(Stream("engine-0"), OTHER)
        for prompt, engine, rank in ((TOKENS, "engine-1", "3"), (OTHER, "engine-0", "0")):
            answer = await rig.complete([*prompt, 7, 8, 9])
            assert (answer.json(), answer.headers["x-worker"]) == ({"text": "done"}, engine)
            assert rig.engines[engine].asked[-1]["prompt"] == [*prompt, 7, 8, 9]
            assert rig.engines[engine].ranks == [rank]


async def test_text_is_tokenized_by_an_engine() -> None:
    async with routed() as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS)
        assert (await rig.complete(" ".join(map(str, TOKENS)))).headers["x-worker"] == "engine-1"


async def test_a_chat_is_streamed_from_the_engine_that_holds_it() -> None:
    async with routed() as rig:
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


async def test_too_much_work_that_waits_sends_a_request_elsewhere() -> None:
    async with routed() as rig:
        await rig.fed.hold(Stream("engine-1"), TOKENS)
        busy = rig.engines["engine-1"]
        slow = asyncio.create_task(rig.complete([*TOKENS, *range(1000, 1020)], slow=True))
        await async_wait_until(lambda: busy.asked, what="the slow request")
        assert (await rig.complete(TOKENS)).headers["x-worker"] == "engine-0"
        busy.may_go_on.set()
        assert (await slow).headers["x-worker"] == "engine-1"
        assert (await rig.complete(TOKENS)).headers["x-worker"] == "engine-1"


async def test_an_engines_refusal_is_the_callers_to_see() -> None:
    async with routed() as rig:
        assert (await rig.complete(TOKENS, bad=True)).status_code == 400


@pytest.mark.parametrize("with_api", [True, False])
async def test_requests_are_served_without_kvsight_and_before_any_engine_was_heard(
    with_api: bool,
) -> None:
    async with routed(with_api) as rig:
        assert (await rig.complete(TOKENS)).status_code == 200
