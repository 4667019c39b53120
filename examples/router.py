"""A router: sends each request to the worker that has most of its prompt cached, unless that worker is too busy.

ENGINES="engine-0=http://10.0.0.1:8000,engine-1=http://10.0.0.2:8000" KVSIGHT_URL=http://127.0.0.1:8000 \
    uvicorn --app-dir examples --port 9000 router:app

The engines must serve OpenAI's API and /tokenize, as vLLM does. Their names are the worker names in kvsight. A request
selects a LoRA adapter by its model name; ADAPTERS="adapter=model,..." maps each adapter to its base model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvsight import AsyncClient, Decision, KvsightError, Outcome, Prompt


def pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)


FIRST_AWAY_S, LONGEST_AWAY_S = 1.0, 30.0
END_BYTES, REUSED = 4096, re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
engines = pairs(os.environ["ENGINES"])
adapters = pairs(os.environ.get("ADAPTERS", ""))
kvsight = AsyncClient(os.environ["KVSIGHT_URL"], token=os.environ.get("KVSIGHT_API_TOKEN"), timeout_s=1.0)
http = httpx.AsyncClient(timeout=httpx.Timeout(600, connect=5), limits=httpx.Limits(max_connections=None))
waiting = dict.fromkeys(engines, 0.0)  # prompt tokens that each engine still has to compute
away_s: dict[str, float] = {}  # engine that could not be reached -> how long it gets no requests
away_until: dict[str, float] = {}
reports: set[asyncio.Task[None]] = set()  # that are being sent


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    async with kvsight, http:
        yield
        await asyncio.gather(*reports)


app = FastAPI(lifespan=lifespan)
app.state.next_warning_at = 0.0


@app.get("/v1/models")
async def models(request: Request) -> StreamingResponse:
    """Return the models of the least busy engine that answers."""
    failures = []
    for worker in by_load():
        try:
            return Relayed(await send(worker, request, None), worker)
        except HTTPException as error:
            failures.append(error.detail)
    raise HTTPException(502, "; ".join(failures))


@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def handle(body: dict[str, Any], request: Request) -> StreamingResponse:
    """Choose a worker, forward the request, and stream the answer back."""
    if not isinstance(body.get("model"), str):
        raise HTTPException(400, "model: missing, or not a string")
    tokens = await tokens_of(body)
    chosen = await choose(body, tokens)
    work = len(tokens) - (chosen.predicted_tokens or 0)
    waiting[chosen.worker] += work  # before the next await, so that concurrent requests see it
    try:
        return Relayed(await send(chosen.worker, request, body, chosen.dp_rank), chosen.worker, chosen)
    finally:
        waiting[chosen.worker] -= work  # the prompt is computed, or the request has failed


async def send(
    worker: str, request: Request, body: dict[str, Any] | None, dp_rank: int | None = None
) -> httpx.Response:
    """Forward a request to an engine. Raises HTTPException (502) if it cannot be reached."""
    headers = {name: value for name, value in request.headers.items() if name == "authorization"}
    if dp_rank is not None:
        headers["x-data-parallel-rank"] = str(dp_rank)
    built = http.build_request(request.method, engines[worker] + request.url.path, json=body, headers=headers)
    with reaching(worker):
        return await http.send(built, stream=True)


@contextmanager
def reaching(worker: str) -> Iterator[None]:
    """Leave an engine alone for a while if it cannot be reached: a second, then two, four, at most 30."""
    try:
        yield
    except httpx.TransportError as error:
        away_s[worker] = min(2 * away_s.get(worker, FIRST_AWAY_S / 2), LONGEST_AWAY_S)
        away_until[worker] = time.monotonic() + away_s[worker]
        raise HTTPException(502, f"{worker} does not answer: {error!r}") from error
    away_s.pop(worker, None)


def load() -> dict[str, float]:
    """Return the queued work of the engines that can be reached, or of all if none can."""
    now = time.monotonic()
    return {name: work for name, work in waiting.items() if away_until.get(name, now) <= now} or waiting


def by_load() -> list[str]:
    """Return the engines of `load`, the least busy one first."""
    return sorted(load(), key=waiting.__getitem__)


class Relayed(StreamingResponse):
    """An engine's answer. At the end, also if the caller disconnects early, it closes the connection to the engine and
    reports what was chosen and what the engine reused.
    """

    def __init__(self, answer: httpx.Response, worker: str, chosen: Decision | None = None) -> None:
        kind = answer.headers.get("content-type")
        super().__init__(self.relayed(), answer.status_code, {"x-worker": worker}, kind)
        self.answer, self.chosen = answer, chosen
        self.end, self.began_at = bytearray(), 0.0  # of the answer: where the engine says what it reused

    async def relayed(self) -> AsyncIterator[bytes]:
        async for chunk in self.answer.aiter_bytes():
            self.began_at = self.began_at or time.time()
            self.end += chunk
            del self.end[:-END_BYTES]
            yield chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self.answer):
                await super().__call__(scope, receive, send)
        finally:
            if self.chosen is not None:
                task = asyncio.create_task(self.report(self.chosen))
                reports.add(task)
                task.add_done_callback(reports.discard)

    async def report(self, chosen: Decision) -> None:
        """Tell kvsight what was chosen and what the engine reused. Failures are ignored."""
        reused = REUSED.findall(self.end)[-1:]
        outcomes = [Outcome(chosen.request_id, int(tokens), self.began_at) for tokens in reused]
        with suppress(KvsightError):
            await kvsight.report_decisions([chosen, *outcomes])


async def tokens_of(body: dict[str, Any]) -> list[int]:
    """Return the prompt's tokens as the engines see them, or none if they refuse the prompt."""
    tokens: list[int] = body.get("prompt") or []
    if isinstance(tokens, str) or not tokens:
        answer = await tokenized(body)
        tokens = answer.json()["tokens"] if answer.is_success else []
    return tokens


async def tokenized(body: dict[str, Any]) -> httpx.Response:
    """Tokenize on the least busy engine that answers."""
    asked = {name: body[name] for name in ("model", "prompt", "messages", "tools") if name in body}
    failures = []
    for worker in by_load():
        try:
            with reaching(worker):
                answer = await http.post(f"{engines[worker]}/tokenize", json=asked, timeout=10)
        except HTTPException as error:
            failures.append(error.detail)
            continue
        if not answer.is_server_error:
            return answer
        failures.append(f"{worker} answers {answer.status_code}")
    raise HTTPException(502, f"no engine tokenizes: {'; '.join(failures)}")


async def choose(body: dict[str, Any], tokens: list[int]) -> Decision:
    """Choose by cached tokens and queued work. Without kvsight, choose by queued work alone."""
    name, salt = body["model"], body.get("cache_salt")
    model, lora_name = (adapters[name], name) if name in adapters else (name, None)
    request_id, prompt = str(uuid.uuid4()), Prompt(model, tokens, lora_name=lora_name, cache_salt=salt)
    try:
        ranked = await kvsight.rank_workers(model, tokens, load=load(), lora_name=lora_name, cache_salt=salt)
    except KvsightError as error:
        warn(error)
        return Decision(request_id, prompt, by_load()[0])
    return Decision(request_id, prompt, ranked[0].worker, ranked[0].dp_rank, ranked[0].tokens, ranked)


def warn(error: KvsightError) -> None:
    """Log that kvsight is unavailable, at most once in ten seconds."""
    if time.monotonic() >= app.state.next_warning_at:
        app.state.next_warning_at = time.monotonic() + 10
        logging.getLogger("router").warning("routing by load alone: %s", error)
