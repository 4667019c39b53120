"""A router: a request goes where most of its prompt is cached, unless too much work waits there.

ENGINES="engine-0=http://10.0.0.1:8000,engine-1=http://10.0.0.2:8000" KVSIGHT_URL=http://127.0.0.1:8000 \
    uvicorn --app-dir examples --port 9000 router:app

The engines speak OpenAI's protocol and know /tokenize, as vLLM's do; their names are those of kvsight's workers. A LoRA
adapter goes by a model name of its own; what it is an adapter of is in ADAPTERS="adapter=model,...".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvsight import AsyncClient, KvsightError, WorkerChoice


def pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)


engines = pairs(os.environ["ENGINES"])
adapters = pairs(os.environ.get("ADAPTERS", ""))
kvsight = AsyncClient(os.environ["KVSIGHT_URL"], token=os.environ.get("KVSIGHT_API_TOKEN"), timeout_s=1.0)
http = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))
waiting = dict.fromkeys(engines, 0.0)  # prompt tokens that each engine has yet to compute


async def handle(request: Request) -> StreamingResponse:
    """Choose, send, and relay the answer as it comes."""
    body = await request.json()
    tokens = await tokens_of(body)
    chosen = await choose(body, tokens)
    work = len(tokens) - chosen.tokens
    waiting[chosen.worker] += work  # before anything else is awaited: the next request has to see it
    try:
        url = engines[chosen.worker] + request.url.path
        rank = {"x-data-parallel-rank": str(chosen.dp_rank)} if chosen.dp_rank is not None else {}
        answer = await http.send(http.build_request("POST", url, json=body, headers=rank), stream=True)
    finally:
        waiting[chosen.worker] -= work  # the first token is there, or there will be none
    return Relayed(answer, chosen.worker)


class Relayed(StreamingResponse):
    """An engine's answer; hangs up on the engine at the end, also when the caller is gone before."""

    def __init__(self, answer: httpx.Response, worker: str) -> None:
        kind = answer.headers.get("content-type")
        super().__init__(answer.aiter_bytes(), answer.status_code, {"x-worker": worker}, kind)
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.answer):
            await super().__call__(scope, receive, send)


async def tokens_of(body: dict[str, Any]) -> list[int]:
    """The prompt as the engines see it, chat template and all."""
    tokens: list[int] = body.get("prompt") or []
    if isinstance(tokens, str) or not tokens:
        asked = {name: body[name] for name in ("model", "prompt", "messages", "tools") if name in body}
        answer = await http.post(f"{next(iter(engines.values()))}/tokenize", json=asked)
        tokens = answer.raise_for_status().json()["tokens"]
    return tokens


async def choose(body: dict[str, Any], tokens: list[int]) -> WorkerChoice:
    """By what is cached and what waits; by what waits alone while kvsight is away."""
    name, salt = body["model"], body.get("cache_salt")
    model, lora_name = (adapters[name], name) if name in adapters else (name, None)
    try:
        chosen = await kvsight.best_worker(model, tokens, load=waiting, lora_name=lora_name, cache_salt=salt)
    except KvsightError as error:
        chosen = None
        complain(error)
    return chosen or WorkerChoice(min(waiting, key=waiting.__getitem__), None, 0, 0.0)


def complain(error: KvsightError) -> None:
    """At most every ten seconds."""
    if time.monotonic() >= app.state.silent_until:
        app.state.silent_until = time.monotonic() + 10
        logging.getLogger("router").warning("by load alone: %s", error)


@asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    async with kvsight, http:
        yield


paths = ("/v1/completions", "/v1/chat/completions")
app = Starlette(routes=[Route(path, handle, methods=["POST"]) for path in paths], lifespan=lifespan)
app.state.silent_until = 0.0
