"""A small reverse proxy for OpenAI-compatible engines, which sends each request where kvsight says.

In front of SMG, the gateway of SGLang, it says which worker gets a request that the gateway passes on.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from api.http_pool import HttpPool, NoAnswerError
from kv_events.runtime.outages import RateLimitedLogger
from kvsight.base_client import address_and_authorization
from kvsight.routers.placement import KnownWorker, Placed, Placement, address_of, body_of, model_of

TARGET = "X-SMG-Target-Worker"
"""Header of a request: the number of the worker that gets it, with the policy consistent_hashing."""
_LIST_EVERY_S, _DEADLINE_S, _MAX_ANSWER_BYTES = 2.0, 0.25, 2**24
_warnings = RateLimitedLogger(logging.getLogger(__name__), "the gateway chooses")

_MAX_BODY_BYTES = 64 * 2**20
_CONNECT_S, _SILENCE_S = 2.0, 600.0  # an engine may compute a long prompt, or wait for its turn
_MOST_ATTEMPTS = 3
_PROMPTS = ("/completions", "/messages", "/responses")
_GATEWAY = "gateway"  # in place of a worker's name: the gateway chose
_ELSEWHERE = frozenset({502, 503, 504})
_OF_ONE_HOP = re.compile("connection|expect|host|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade", re.I)
_OURS = re.compile(f"{_OF_ONE_HOP.pattern}|{TARGET}", re.I)
"""Headers of a caller that are not passed on."""
_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # by aiohttp, if the caller sends none
_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class _Worker(msgspec.Struct):
    id: str
    url: str
    is_healthy: bool = True


class _List(msgspec.Struct):
    workers: list[_Worker]


_decoder = msgspec.json.Decoder(_List)


class Gateway:
    """A gateway with one model. Belongs to one event loop."""

    def __init__(self, url: str) -> None:
        """Raises InvalidValueError."""
        self.url, self._headers = address_and_authorization(url, None, "gateway")
        self._pool = HttpPool(_MAX_ANSWER_BYTES)
        self._list_at = -math.inf
        self._numbers: Mapping[str, int] = {}

    async def numbers(self) -> Mapping[str, int]:
        """Return address -> number of the healthy workers, as last heard. Never raises.

        The gateway counts workers in the order of their registration, in which their ids ascend (UUIDs of version 7).
        It lists them in another one.
        """
        if time.monotonic() >= self._list_at:
            self._list_at = time.monotonic() + _LIST_EVERY_S
            try:
                answer = await self._pool.send("GET", f"{self.url}/workers", _DEADLINE_S, self._headers)
                workers = sorted(_decoder.decode(answer.body).workers, key=lambda each: each.id)
            except (NoAnswerError, msgspec.DecodeError, UnicodeDecodeError) as error:
                _warnings.warning("its workers stay as they were: %s", error)
            else:
                self._numbers = {address_of(each.url): number for number, each in enumerate(workers) if each.is_healthy}
        return self._numbers

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.close()


class _Way(NamedTuple):
    """One attempt to get an answer."""

    worker: str
    url: str
    headers: Mapping[str, str] = {}
    """Further ones of the request."""
    failures: frozenset[int] = _ELSEWHERE
    """Statuses after which the next way is tried."""


class RouteProxy:
    """The proxy as an application of aiohttp. Closes the placement and the gateway at its end."""

    def __init__(self, placement: Placement, gateway: Gateway | None = None) -> None:
        """gateway: passes requests on to the workers. None: they go there directly."""
        self._placement = placement
        self._gateway = gateway
        self._turn = count()
        self._warnings = RateLimitedLogger(logging.getLogger(__name__), "route")
        self._registry = registry = CollectorRegistry()
        name, labels = "kvsight_route", ["worker", "chosen_by"]
        self._requests = Counter(f"{name}_requests", "Requests sent to workers", labels, registry=registry)
        self._failures = Counter(f"{name}_failures", "Answers that failed", ["worker"], registry=registry)
        self._seconds = Histogram(f"{name}_choice_seconds", "Time to choose a worker", registry=registry)
        self._http: aiohttp.ClientSession

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._running)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _running(self, _app: web.Application) -> AsyncGenerator[None]:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_ADDED,
        )
        async with self._http:
            yield
        await self._placement.aclose()
        if self._gateway:
            await self._gateway.aclose()

    async def _health(self, _request: web.Request) -> web.Response:
        workers = sorted(await self._placement.workers())
        return web.json_response({"status": "ok", "workers": workers}) if workers else _refusal(503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Choose a worker and pass its answer on. One that fails before the first byte is followed by another one."""
        content = await request.read()
        body = body_of(content) if request.path.endswith(_PROMPTS) else None  # the engine says what is wrong
        with self._seconds.time():
            workers = _serving(await self._placement.workers(), body)
            numbers = await self._gateway.numbers() if self._gateway else None
            if numbers is not None:
                workers = {name: each for name, each in workers.items() if each.url in numbers}
            placed = await self._placed(body, workers)
        try:
            for way in self._ways(workers, placed, numbers):
                worker = way.worker
                self._requests.labels(worker, "kvsight" if placed and worker in placed.workers else "turn").inc()
                try:
                    answer = await self._ask(way, request, content)
                    first = await _first(answer, way.failures)
                except _ERRORS as error:
                    self._failed(worker, error)
                else:
                    if placed and worker == _GATEWAY:
                        self._placement.release(placed.selection_id)
                        placed = None
                    elif placed and worker != placed.worker:
                        placed = self._placement.move(placed, worker)
                    if placed and answer.content_type == "text/event-stream":
                        self._placement.complete(placed.selection_id)
                    return await self._pass_on(request, worker, answer, first)
        finally:
            if placed:
                self._placement.release(placed.selection_id)
        return _refusal(502 if workers else 503)

    async def _placed(self, body: Mapping[str, Any] | None, workers: Mapping[str, KnownWorker]) -> Placed | None:
        new = sum(not worker.model for worker in workers.values())  # used in turn, they send events and become known
        if body is None or not workers or secrets.randbelow(len(workers)) < new:
            return None
        return await self._placement.place(body, workers)

    def _ways(
        self, workers: Mapping[str, KnownWorker], placed: Placed | None, numbers: Mapping[str, int] | None
    ) -> Iterator[_Way]:
        """Yield ways to try, one after the other. numbers: see `Gateway.numbers`."""
        if self._gateway is None or numbers is None:
            yield from (_Way(worker, workers[worker].url) for worker in self._order(workers, placed))
        else:
            url = self._gateway.url
            if placed:
                target = {TARGET: str(numbers[workers[placed.worker].url])}
                yield _Way(placed.worker, url, target, _ELSEWHERE | {500})  # it does not try another worker then
            yield _Way(_GATEWAY, url, failures=frozenset())

    def _order(self, workers: Mapping[str, KnownWorker], placed: Placed | None) -> Sequence[str]:
        """Return workers to ask, one after the other: the chosen one, the next best ones, and the others in turn."""
        present = self._placement.present(workers)
        turn = next(self._turn) % max(1, len(present))
        chosen = placed.workers if placed else ()
        return list(dict.fromkeys([*chosen, *present[turn:], *present[:turn]]))[:_MOST_ATTEMPTS]

    async def _ask(self, way: _Way, request: web.Request, content: bytes) -> aiohttp.ClientResponse:
        given = [(name, value) for name, value in request.headers.items() if not _OURS.fullmatch(name)]
        return await self._http.request(
            request.method,
            f"{way.url}{request.rel_url.raw_path_qs}",  # also of an absolute address
            headers=[*given, *way.headers.items()],
            data=content or None,
            allow_redirects=False,
        )

    async def _pass_on(
        self, request: web.Request, worker: str, answer: aiohttp.ClientResponse, chunk: bytes
    ) -> web.StreamResponse:
        """Send an answer to the caller as it comes. A caller that goes away ends the engine's request, too."""
        passed = web.StreamResponse(status=answer.status, reason=answer.reason)
        passed.headers.extend([each for each in answer.headers.items() if not _OF_ONE_HOP.fullmatch(each[0])])
        passed.headers["X-Kvsight-Worker"] = worker
        try:
            await passed.prepare(request)
            while chunk:
                await passed.write(chunk)
                try:
                    chunk = await answer.content.readany()
                except _ERRORS as error:
                    self._failed(worker, error)
                    if request.transport is not None:
                        request.transport.abort()  # the caller must not take a part for the whole
                    return passed
            await passed.write_eof()
        finally:
            answer.close()
        return passed

    def _failed(self, worker: str, error: Exception) -> None:
        self._failures.labels(worker).inc()
        self._placement.leave_out(worker)
        self._warnings.warning("%s fails: %r", worker, error)


async def _first(answer: aiohttp.ClientResponse, failures: frozenset[int]) -> bytes:
    """Return the first bytes of an answer. Raises one of `_ERRORS`, also for some statuses: `failures`."""
    try:
        if answer.status in failures:
            answer.raise_for_status()
        return await answer.content.readany()
    except BaseException:
        answer.close()
        raise


def _serving(workers: Mapping[str, KnownWorker], body: Mapping[str, Any] | None) -> Mapping[str, KnownWorker]:
    """Return the workers of the model that a request names, else all."""
    model = None if body is None else model_of(body)
    return {name: worker for name, worker in workers.items() if worker.model in (model, "")} or workers


def _refusal(status: int) -> web.Response:
    message = "no worker is known" if status == 503 else "no worker answers"
    return web.json_response({"error": {"message": f"kvsight route: {message}", "code": status}}, status=status)
