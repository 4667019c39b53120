"""A small router: sends each request to the worker that has most of its prompt cached, unless that worker is too busy.

ENGINES="engine-0=http://10.0.0.1:8000,engine-1=http://10.0.0.2:8000" KVSIGHT_URL=http://127.0.0.1:8000 \
    uvicorn --app-dir examples --port 9000 small_router:app
"""

import os
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from kvsight import AsyncClient, Decision, KvsightError, Outcome, Prompt

AWAY_S, END_BYTES, REUSED = 5.0, 4096, re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
engines = dict(pair.split("=", 1) for pair in os.environ["ENGINES"].split(","))  # worker name -> address
waiting = dict.fromkeys(engines, 0.0)  # prompt tokens that each engine still has to compute
away_until = dict.fromkeys(engines, 0.0)  # an engine that could not be reached gets no requests for AWAY_S seconds
kvsight = AsyncClient(os.environ["KVSIGHT_URL"], token=os.environ.get("KVSIGHT_API_TOKEN"), timeout_s=1.0)
http = httpx.AsyncClient(timeout=httpx.Timeout(600, connect=5), limits=httpx.Limits(max_connections=None))
app = FastAPI()


@app.get("/v1/models")
async def models(request: Request) -> StreamingResponse:
    """Return the models of the least busy engine."""
    return await forward(least_busy(), request, None)


@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def handle(body: dict[str, Any], request: Request) -> StreamingResponse:
    """Choose a worker, forward the request, and stream the answer back."""
    if not isinstance(body.get("model"), str):
        raise HTTPException(400, "model: missing, or not a string")
    tokens = body["prompt"] if isinstance(body.get("prompt"), list) else await tokenize(least_busy(), body)
    chosen = await choose(body, tokens)
    work = len(tokens) - (chosen.predicted_tokens or 0)
    waiting[chosen.worker] += work  # before the next await, so that concurrent requests see it
    try:
        return await forward(chosen.worker, request, body, chosen)
    finally:
        waiting[chosen.worker] -= work  # the prompt is computed, or the request has failed


async def forward(
    worker: str, request: Request, body: dict[str, Any] | None, chosen: Decision | None = None
) -> StreamingResponse:
    """Send a request to an engine and stream the answer back. Report what was chosen and what the engine reused."""
    answer = await send(worker, http.build_request(request.method, engines[worker] + request.url.path, json=body))
    end = bytearray()  # of the answer, where the engine says what it reused

    async def relayed() -> AsyncIterator[bytes]:
        async for chunk in answer.aiter_bytes():
            end.extend(chunk)
            del end[:-END_BYTES]
            yield chunk

    async def finish() -> None:
        await answer.aclose()
        if chosen is not None:
            await report(chosen, REUSED.findall(end))

    kind = answer.headers.get("content-type")
    return StreamingResponse(relayed(), answer.status_code, {"x-worker": worker}, kind, BackgroundTask(finish))


async def report(chosen: Decision, reused: list[bytes]) -> None:
    """Tell kvsight what was chosen and what the engine reused. Failures are ignored."""
    with suppress(KvsightError):
        await kvsight.report_decisions([chosen, *(Outcome(chosen.request_id, int(tokens)) for tokens in reused[-1:])])


async def send(worker: str, request: httpx.Request) -> httpx.Response:
    """Send a request to an engine. An engine that cannot be reached is left alone for a while."""
    try:
        return await http.send(request, stream=True)
    except httpx.TransportError as error:
        away_until[worker] = time.monotonic() + AWAY_S
        raise HTTPException(502, f"{worker} does not answer: {error!r}") from error


async def tokenize(worker: str, body: dict[str, Any]) -> list[int]:
    """Return the prompt's tokens as the engine sees them, or none if it refuses the prompt."""
    asked = {name: body[name] for name in ("model", "prompt", "messages", "tools") if name in body}
    answer = await send(worker, http.build_request("POST", f"{engines[worker]}/tokenize", json=asked))
    await answer.aread()
    tokens: list[int] = answer.json()["tokens"] if answer.is_success else []
    return tokens


async def choose(body: dict[str, Any], tokens: list[int]) -> Decision:
    """Choose a worker by cached tokens and queued work. Without kvsight, choose by queued work alone."""
    request_id, prompt = str(uuid.uuid4()), Prompt(body["model"], tokens, cache_salt=body.get("cache_salt"))
    try:
        ranked = await kvsight.rank_workers(body["model"], tokens, load=load(), cache_salt=body.get("cache_salt"))
    except KvsightError:
        return Decision(request_id, prompt, least_busy())
    return Decision(request_id, prompt, ranked[0].worker, None, ranked[0].tokens, ranked)


def load() -> dict[str, float]:
    """Return the queued work of the engines that can be reached, or of all if none can."""
    now = time.monotonic()
    return {name: work for name, work in waiting.items() if away_until[name] <= now} or waiting


def least_busy() -> str:
    """Return the engine with the least queued work."""
    return min(load(), key=waiting.__getitem__)
