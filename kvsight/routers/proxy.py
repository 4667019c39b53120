"""A small reverse proxy for OpenAI-compatible engines, which sends each request where kvsight says."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from http import HTTPStatus
from itertools import count
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kvsight.routers.placement import KnownWorker, Placed, Placement

_MAX_BODY_BYTES = 64 * 2**20
_CONNECT_S = 2.0
_SILENCE_S = 600.0  # of an engine that computes a long prompt or waits for its turn
_MOST_ATTEMPTS = 3
_PROMPTS = ("/chat/completions", "/completions", "/messages", "/responses")
_ELSEWHERE = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})
_OF_ONE_HOP = frozenset(
    {
        "connection",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # by aiohttp, if the caller sends none
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class _Answer(NamedTuple):
    """The beginning of an engine's answer."""

    response: aiohttp.ClientResponse
    first: bytes


class _NotNowError(Exception):
    """An engine cannot answer. Another one may."""


class RouteMetrics:
    """What the proxy counts, as Prometheus reads it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvsight_route_requests", "Requests by worker and by who chose it", ["worker", "chosen_by"],
            registry=self.registry,
        )  # fmt: skip
        self.failures = Counter("kvsight_route_failures", "Answers that failed", ["worker"], registry=self.registry)
        self.seconds = Histogram(
            "kvsight_route_choice_seconds", "Time to choose a worker", buckets=_BUCKETS_S, registry=self.registry
        )


class RouteProxy:
    """The proxy as an application of aiohttp. Closes the placement at its end."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._turn = count()
        self._metrics = RouteMetrics()
        self._warnings = RateLimitedLogger(logging.getLogger(__name__), "route")
        self._http: aiohttp.ClientSession

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._running)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _running(self, _app: web.Application) -> AsyncGenerator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_ADDED,
        )
        async with self._http:
            yield
        await self._placement.aclose()

    async def _health(self, _request: web.Request) -> web.Response:
        workers = await self._placement.workers()
        if not workers:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "no worker is known")
        return web.json_response({"status": "ok", "workers": sorted(workers)})

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), content_type="text/plain")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Choose a worker, ask it, and if it cannot answer another one. Then pass on the answer as it comes."""
        content = await request.read()
        body = _decoded(content) if request.path.endswith(_PROMPTS) else None
        began = time.monotonic()
        workers = _serving(await self._placement.workers(), body)
        placed = await self._placed(workers, body)
        self._metrics.seconds.observe(time.monotonic() - began)
        try:
            for worker in self._order(workers, placed):
                chosen_by = "kvsight" if placed is not None and worker == placed.worker else "turn"
                self._metrics.requests.labels(worker, chosen_by).inc()
                try:
                    answer = await self._ask(workers[worker].url, request, content)
                except _NotNowError as error:
                    self._metrics.failures.labels(worker).inc()
                    self._placement.leave_out(worker)
                    self._warnings.warning("%s does not answer: %s", worker, error)
                    continue
                return await self._pass_on(request, worker, answer, placed)
        finally:
            if placed is not None:
                self._placement.release(placed.selection_id)
        if not workers:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "no worker is known")
        return _refusal(HTTPStatus.BAD_GATEWAY, "no worker answers")

    async def _placed(self, workers: Mapping[str, KnownWorker], body: dict[str, Any] | None) -> Placed | None:
        new = sum(not worker.model for worker in workers.values())  # no event has come: used in turn, they send some
        if body is None or not workers or secrets.randbelow(len(workers)) < new:
            return None
        return await self._placement.place(body, workers)

    def _order(self, workers: Mapping[str, KnownWorker], placed: Placed | None) -> Sequence[str]:
        """Return workers to ask, one after the other: the chosen one, and the others in turn."""
        present = self._placement.present(workers)
        turn = next(self._turn) % len(present) if present else 0
        others = [*present[turn:], *present[:turn]]
        first = [] if placed is None else [placed.worker]
        return [*first, *(each for each in others if each not in first)][:_MOST_ATTEMPTS]

    async def _ask(self, url: str, request: web.Request, content: bytes) -> _Answer:
        """Send a request to an engine and wait for the first byte of its answer. Raises _NotNowError."""
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _OF_ONE_HOP]
        try:
            response = await self._http.request(
                request.method, f"{url}{request.raw_path}", headers=headers, data=content or None, allow_redirects=False
            )
            try:
                first = await response.content.readany()
            except BaseException:
                response.close()
                raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _NotNowError(str(error) or type(error).__name__) from error
        if response.status in _ELSEWHERE:
            response.close()
            raise _NotNowError(f"status {response.status}")
        return _Answer(response, first)

    async def _pass_on(
        self, request: web.Request, worker: str, answer: _Answer, placed: Placed | None
    ) -> web.StreamResponse:
        """Send an answer to the caller as it comes. A caller that goes away ends the engine's request, too."""
        source, first = answer
        if placed is not None and source.content_type == "text/event-stream":
            self._placement.complete(placed.selection_id)
        passed = web.StreamResponse(status=source.status, reason=source.reason)
        for name, value in source.headers.items():
            if name.lower() not in _OF_ONE_HOP:
                passed.headers.add(name, value)
        passed.headers["X-Kvsight-Worker"] = worker
        try:
            await passed.prepare(request)
            chunk: bytes | None = first
            while chunk:
                await passed.write(chunk)
                chunk = await self._next(worker, source)
            if chunk is not None:
                await passed.write_eof()
            elif request.transport is not None:
                request.transport.abort()  # the caller must not take a part for the whole
        finally:
            source.close()
        return passed

    async def _next(self, worker: str, source: aiohttp.ClientResponse) -> bytes | None:
        """Return the next bytes of an answer, none at its end. None: the engine broke off."""
        try:
            return await source.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._metrics.failures.labels(worker).inc()
            self._placement.leave_out(worker)
            self._warnings.warning("%s breaks off: %r", worker, error)
            return None


def _decoded(content: bytes) -> dict[str, Any] | None:
    """Return the body of a request with a prompt. None: it has none, and the engine says so itself."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _serving(workers: Mapping[str, KnownWorker], body: Mapping[str, Any] | None) -> Mapping[str, KnownWorker]:
    """Return the workers of the model that a request names, else all."""
    model = None if body is None else body.get("model")
    return {name: worker for name, worker in workers.items() if worker.model in (model, "")} or workers


def _refusal(status: HTTPStatus, message: str) -> web.Response:
    error = {"message": f"kvsight route: {message}", "type": status.phrase, "code": status.value}
    return web.json_response({"error": error}, status=status)
