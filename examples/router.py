"""A router in few lines: a request goes where most of its prompt is cached, unless too much work waits there.

ENGINES="engine-0=http://10.0.0.1:8000,engine-1=http://10.0.0.2:8000" KVSIGHT_URL=http://127.0.0.1:8080 \
    uvicorn --app-dir examples --port 9000 router:app

The engines speak OpenAI's protocol and know /tokenize, as vLLM's do; their names are those of kvsight's workers.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from kvsight import AsyncClient, KvsightError, WorkerChoice

engines = dict(pair.split("=", 1) for pair in os.environ["ENGINES"].split(","))
kvsight = AsyncClient(os.environ["KVSIGHT_URL"], token=os.environ.get("KVSIGHT_API_TOKEN"), timeout_s=1.0)
http = httpx.AsyncClient(timeout=600)
waiting = dict.fromkeys(engines, 0.0)  # prompt tokens that each engine has yet to compute


async def handle(request: Request) -> StreamingResponse:
    """Choose, send, and relay the answer as it comes."""
    body = await request.json()
    tokens = await tokens_of(body)
    chosen = await choose(body["model"], tokens)
    work = len(tokens) - chosen.tokens
    waiting[chosen.worker] += work  # before anything else is awaited: the next request has to see it
    try:
        url = engines[chosen.worker] + request.url.path
        rank = {"x-data-parallel-rank": str(chosen.dp_rank)} if chosen.dp_rank is not None else {}
        answer = await http.send(http.build_request("POST", url, json=body, headers=rank), stream=True)
    finally:
        waiting[chosen.worker] -= work  # the first token is there, or there will be none
    headers = {"content-type": answer.headers["content-type"], "x-worker": chosen.worker}
    return StreamingResponse(relayed(answer), answer.status_code, headers)


async def relayed(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Hangs up on the engine when the caller does."""
    async with aclosing(answer):
        async for chunk in answer.aiter_bytes():
            yield chunk


async def tokens_of(body: dict[str, Any]) -> list[int]:
    """The prompt as the engines see it, chat template and all."""
    tokens: list[int] = body.get("prompt") or []
    if isinstance(tokens, str) or not tokens:
        asked = {name: body[name] for name in ("model", "prompt", "messages", "tools") if name in body}
        answer = await http.post(f"{next(iter(engines.values()))}/tokenize", json=asked)
        tokens = answer.raise_for_status().json()["tokens"]
    return tokens


async def choose(model: str, tokens: list[int]) -> WorkerChoice:
    """By what is cached and what waits; by what waits alone while kvsight is away."""
    try:
        chosen = await kvsight.best_worker(model, tokens, load=waiting)
    except KvsightError:
        chosen = None
    return chosen or WorkerChoice(min(waiting, key=waiting.__getitem__), None, 0, 0.0)


@asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    async with kvsight, http:
        yield


paths = ("/v1/completions", "/v1/chat/completions")
app = Starlette(routes=[Route(path, handle, methods=["POST"]) for path in paths], lifespan=lifespan)
