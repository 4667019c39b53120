"""A small router: sends each request to the worker that has most of its prompt cached, unless that worker is too busy.

ENGINES="engine-0=http://10.0.0.1:8000,engine-1=http://10.0.0.2:8000" KVSIGHT_URL=http://127.0.0.1:8000 \
    uvicorn --app-dir examples --port 9000 small_router:app
"""

import os
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from kvsight import AsyncClient, KvsightError

engines = dict(pair.split("=", 1) for pair in os.environ["ENGINES"].split(","))  # worker name -> address
waiting = dict.fromkeys(engines, 0.0)  # prompt tokens that each engine still has to compute
kvsight = AsyncClient(os.environ["KVSIGHT_URL"], token=os.environ.get("KVSIGHT_API_TOKEN"), timeout_s=1.0)
http = httpx.AsyncClient(timeout=httpx.Timeout(600, connect=5), limits=httpx.Limits(max_connections=None))
app = FastAPI()


@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def handle(body: dict[str, Any], request: Request) -> StreamingResponse:
    """Choose a worker, forward the request, and stream the answer back."""
    worker, work = min(waiting, key=waiting.__getitem__), 0
    try:
        tokens = body["prompt"] if isinstance(body.get("prompt"), list) else await tokenize(worker, body)
        worker, work = await choose(body, tokens)
        waiting[worker] += work  # before the next await, so that concurrent requests see it
        forwarded = http.build_request("POST", engines[worker] + request.url.path, json=body)
        answer = await http.send(forwarded, stream=True)
    except httpx.TransportError as error:
        raise HTTPException(502, f"{worker} does not answer: {error!r}") from error
    finally:
        waiting[worker] -= work  # the prompt is computed, or the request has failed
    kind, hang_up = answer.headers.get("content-type"), BackgroundTask(answer.aclose)
    return StreamingResponse(answer.aiter_bytes(), answer.status_code, {"x-worker": worker}, kind, hang_up)


async def tokenize(worker: str, body: dict[str, Any]) -> list[int]:
    """Return the prompt's tokens as the engine sees them, or none if it refuses the prompt."""
    asked = {name: body[name] for name in ("model", "prompt", "messages", "tools") if name in body}
    answer = await http.post(f"{engines[worker]}/tokenize", json=asked)
    tokens: list[int] = answer.json()["tokens"] if answer.is_success else []
    return tokens


async def choose(body: dict[str, Any], tokens: list[int]) -> tuple[str, int]:
    """Return a worker and the number of tokens it has to compute. Without kvsight, choose by queued work alone."""
    try:
        best = await kvsight.best_worker(body["model"], tokens, load=waiting, cache_salt=body.get("cache_salt"))
    except KvsightError:
        best = None
    return (best.worker, len(tokens) - best.tokens) if best else (min(waiting, key=waiting.__getitem__), len(tokens))
