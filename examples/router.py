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
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvsight import AsyncClient, KvsightError, WorkerChoice


def pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)


engines = pairs(os.environ["ENGINES"])
adapters = pairs(os.environ.get("ADAPTERS", ""))
kvsight = AsyncClient(os.environ["KVSIGHT_URL"], token=os.environ.get("KVSIGHT_API_TOKEN"), timeout_s=1.0)
http = httpx.AsyncClient(timeout=httpx.Timeout(600, connect=5), limits=httpx.Limits(max_connections=None))
waiting = dict.fromkeys(engines, 0.0)  # prompt tokens that each engine has yet to compute


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    async with kvsight, http:
        yield


app = FastAPI(lifespan=lifespan)
app.state.silent_until = 0.0


@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def handle(body: dict[str, Any], request: Request) -> StreamingResponse:
    """Choose, send, and relay the answer as it comes."""
    tokens = await tokens_of(body)
    chosen = await choose(body, tokens)
    work = len(tokens) - chosen.tokens
    waiting[chosen.worker] += work  # before anything else is awaited: the next request has to see it
    try:
        url = engines[chosen.worker] + request.url.path
        headers = {name: value for name, value in request.headers.items() if name == "authorization"}
        if chosen.dp_rank is not None:
            headers["x-data-parallel-rank"] = str(chosen.dp_rank)
        answer = await http.send(http.build_request("POST", url, json=body, headers=headers), stream=True)
    except httpx.TransportError as error:
        raise HTTPException(502, f"{chosen.worker} does not answer: {error!r}") from error
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
    """The prompt as the engines see it, chat template and all; nothing if it is refused, as the request will be."""
    tokens: list[int] = body.get("prompt") or []
    if isinstance(tokens, str) or not tokens:
        answer = await tokenized(body)
        tokens = answer.json()["tokens"] if answer.is_success else []
    return tokens


async def tokenized(body: dict[str, Any]) -> httpx.Response:
    """By the engine with the least to do, of those that can."""
    asked = {name: body[name] for name in ("model", "prompt", "messages", "tools") if name in body}
    failures = []
    for worker in sorted(engines, key=waiting.__getitem__):
        try:
            answer = await http.post(f"{engines[worker]}/tokenize", json=asked, timeout=10)
            if not answer.is_server_error:
                return answer
            failures.append(f"{worker} answers {answer.status_code}")
        except httpx.TransportError as error:
            failures.append(f"{worker} does not answer: {error!r}")
    raise HTTPException(502, f"no engine tokenizes: {'; '.join(failures)}")


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
