"""The API over HTTP: `python -m benchmarks.bench_http [--json FILE]`

102,400 pages of 100 prompts, and 16 workers that hold each prompt to a different depth. Each request asks for 1,000
pages of 16 tokens. Workers of the hybrid model have sliding windows of 1,024 tokens and a state at each page, too. The
server (uvicorn, uvloop) runs in its own process; callers use keep-alive connections on loopback. "in the handler" calls
the same route without server and HTTP.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
import uvloop

from api.app import create_app
from api.fast.local_answers import LocalAnswers
from api.queries.routes import QueryRoutes
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from benchmarks.report import Figure, figure, main
from indexer.applier import Applier, DeadLetters
from indexer.consumer import Consumer
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.sources.memory import MemorySource
from indexer.views import ViewState
from kv_events.codec import StoredPages
from kv_events.hashing import sequence_hashes
from kv_events.log.memory import MemoryLog
from kv_events.streams import StreamId

PROMPTS, PAGES, PAGE_TOKENS, WORKERS, ASKED_PAGES = 100, 1024, 16, 16, 1000
SEQUENTIAL, CALLERS, PER_CALLER = 400, 8, 100
_DAY_S = 86_400.0
_SEED = 1


class Request(NamedTuple):
    """One kind of request, with a body for each prompt."""

    name: str
    path: str
    content_type: str
    bodies: list[bytes]
    goal: str


def prompts() -> list[np.ndarray]:
    """uint32[PAGES * PAGE_TOKENS] each."""
    random = np.random.default_rng(_SEED)
    return list(random.integers(0, 128_000, (PROMPTS, PAGES * PAGE_TOKENS), dtype=np.uint32))


def requests() -> list[Request]:
    """Return the kinds of requests that are compared."""
    asked = [tokens[: ASKED_PAGES * PAGE_TOKENS] for tokens in prompts()]
    hashes = [sequence_hashes(tokens, PAGE_TOKENS) for tokens in asked]
    json, msgpack = "application/json", "application/msgpack"
    return [
        Request("JSON tokens", "/query", json, [_body(msgspec.json, token_ids=t.tolist()) for t in asked], ""),
        Request(
            "JSON tokens, hybrid",
            "/query",
            json,
            [_body(msgspec.json, model_name="hybrid", token_ids=t.tolist()) for t in asked],
            "",
        ),
        Request("packed tokens", "/query", msgpack, [_body(msgspec.msgpack, token_ids=t.tobytes()) for t in asked], ""),
        Request(
            "JSON hashes", "/query_by_hash", json, [_body(msgspec.json, seq_hashes=h.tolist()) for h in hashes], "< 1"
        ),
        Request(
            "packed hashes",
            "/query_by_hash",
            msgpack,
            [_body(msgspec.msgpack, seq_hashes=h.tobytes()) for h in hashes],
            "< 1",
        ),
    ]


def _body(codec: Any, **prompt: Any) -> bytes:
    body: bytes = codec.encode({"model_name": "m"} | prompt)
    return body


def filled_consumer(num_workers: int = WORKERS, models: Iterable[str] = ("m",)) -> Consumer:
    """Return views that never expire. Worker w holds the first (w + 1) / num_workers of each prompt of each model."""
    settings = IndexerSettings(max_pages=2**18, worker_ttl_s=_DAY_S, forget_after_s=_DAY_S)
    consumer = Consumer(MemorySource(MemoryLog()), Applier(Namespaces(settings), DeadLetters()), settings)
    starts = np.zeros(PAGES // 8, np.uint8)
    starts[0] = 1
    held = [sequence_hashes(tokens, PAGE_TOKENS) for tokens in prompts()]
    events = [StoredPages(0, hashes, hashes, starts, np.zeros(1, np.uint64)) for hashes in held]
    for model, number in product(models, range(num_workers)):
        view = consumer.namespaces.add_view(StreamId(model, "default", f"w{number}", 0), PAGE_TOKENS)
        view.state, view.last_batch_at = ViewState.LIVE, time.time()
        for event in events:
            view.index.store(view.number, event, 0, PAGES * (number + 1) // num_workers)
    return consumer


# --- the server's process ---


def _serve(pipe: Connection, *held: Any) -> None:
    async def run() -> None:
        settings = ApiSettings(port=0)
        async with running_server(create_app(LiveService(filled_consumer(*held), settings)), settings) as url:
            pipe.send(url)
            await asyncio.to_thread(pipe.recv)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@contextmanager
def server_process(*held: Any) -> Iterator[str]:
    """Yield the URL of a server that runs for the duration of the block. held: parameters of `filled_consumer`."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, *held))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


# --- callers ---


class Caller:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, url: str) -> Caller:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    async def ask(self, request: Request, number: int) -> float:
        """Return the seconds from the first byte sent to the last byte received."""
        body = request.bodies[number % PROMPTS]
        head = (
            f"POST {request.path} HTTP/1.1\r\nhost: bench\r\n"
            f"content-type: {request.content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await self._reader.readexactly(length)
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"{request.name}: {answer!r}")
        return time.perf_counter() - began


async def over_http(url: str, request: Request) -> list[Figure]:
    """Measure the latency of one caller and the throughput of several."""
    caller = await Caller.connect(url)
    seconds = [await caller.ask(request, number) for number in range(SEQUENTIAL + 20)][20:]
    callers = [await Caller.connect(url) for _ in range(CALLERS)]

    async def work(each: Caller, first: int) -> None:
        for number in range(first, first + PER_CALLER):
            await each.ask(request, number)

    began = time.perf_counter()
    await asyncio.gather(*(work(each, i * PER_CALLER) for i, each in enumerate(callers)))
    rate = CALLERS * PER_CALLER / (time.perf_counter() - began)
    milliseconds = [1000 * s for s in seconds]
    return [
        figure(f"{request.name}: one caller", "ms", milliseconds),
        figure(f"{request.name}: one caller, p99", "ms", [float(np.percentile(milliseconds, 99))]),
        figure(f"{request.name}: {CALLERS} callers", "requests/s", [rate]),
    ]


# --- without HTTP ---


async def in_handler(consumer: Consumer, request: Request) -> Figure:
    """Measure the route alone, called as an ASGI application."""
    routes = QueryRoutes(LocalAnswers(consumer), lambda: None, ApiSettings().max_body_bytes)
    endpoint = routes.endpoints()[request.path]
    scope = {"type": "http", "headers": [(b"content-type", request.content_type.encode())]}
    statuses, milliseconds = set(), []

    async def send(message: Any) -> None:
        statuses.add(message.get("status", 200))

    for number in range(SEQUENTIAL):
        message = {"type": "http.request", "body": request.bodies[number % PROMPTS], "more_body": False}

        async def receive(message: Any = message) -> Any:
            return message

        began = time.perf_counter()
        await endpoint(scope, receive, send)
        milliseconds.append(1000 * (time.perf_counter() - began))
    if statuses != {200}:
        raise RuntimeError(f"{request.name}: statuses {statuses}")
    return figure(f"{request.name}: in the handler", "ms", milliseconds, request.goal)


def run() -> list[Figure]:
    """Return all figures."""
    kinds, held = requests(), (WORKERS, ("m", "hybrid", "hybrid#swa:1024", "hybrid#mamba"))
    consumer = filled_consumer(*held)
    figures = [asyncio.run(in_handler(consumer, request)) for request in kinds]
    with server_process(*held) as url:
        for request in kinds:
            figures += asyncio.run(over_http(url, request))
    return figures


if __name__ == "__main__":
    main("the API over HTTP", run)
