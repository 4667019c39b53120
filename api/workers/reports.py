"""What engines say of themselves in their `/metrics`, read about once a second: their room and their load."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

from api.http_pool import HttpPool, NoAnswerError
from api.workers.allowed_addresses import AllowedAddresses
from api.workers.engine_metrics import EngineMetrics, metrics_of, place_of
from indexer.consumer import Consumer
from kv_events.errors import KvsightError
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.streams import StreamId
from selection.roster import Report

_limited_logger = RateLimitedLogger(logging.getLogger(__name__), "engine metrics")

_ASK_EVERY_S = 1.0
_RETRY_S = 5.0
_LOOK_EVERY_S = 0.25
_FRESH_S = 5.0
"""Age at which a load is no longer believed."""
_TIMEOUT_S = 2.0
_MAX_BYTES = 2 * 2**20
_AT_ONCE = 64
_LARGE = 64 * 1024
"""A longer text is read in another thread."""


class Reports:
    """The newest answers of engines. One event loop calls it. Each request goes to an address that `allowed` judged."""

    def __init__(
        self, consumer: Consumer, urls: Callable[[], Mapping[StreamId, str]], allowed: AllowedAddresses
    ) -> None:
        """urls: returns the address of the metrics of each rank."""
        self._consumer = consumer
        self._urls = urls
        self._allowed = allowed
        self._rooms: dict[StreamId, int] = {}
        self._reports: dict[StreamId, Report] = {}
        self._due: dict[str, float] = {}  # by address; infinite while it is asked
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def room(self, stream: StreamId) -> int:
        """Return for how many tokens a rank has room on its device, or 0 if that is not known."""
        return self._rooms.get(stream, 0)

    def of(self, stream: StreamId) -> Report | None:
        """Return the load of a rank. None: its engine has not said it for five seconds."""
        report = self._reports.get(stream)
        return None if report is None or time.time() - report.at > _FRESH_S else report

    async def follow(self) -> None:
        """Ask engines forever."""
        pool = HttpPool(_MAX_BYTES)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for url, streams in self._due_now().items():
                        self._due[url] = float("inf")
                        group.create_task(self._ask(pool, url, streams), name=f"metrics:{url}")
                    await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            await pool.close()

    def _due_now(self) -> dict[str, list[StreamId]]:
        """Return the addresses to ask now, each with its ranks. What is known of others is forgotten."""
        urls, by_url = self._urls(), dict[str, list[StreamId]]()
        for stream, url in urls.items():
            by_url.setdefault(url, []).append(stream)
        self._rooms = {stream: room for stream, room in self._rooms.items() if stream in urls}
        self._reports = {stream: report for stream, report in self._reports.items() if stream in urls}
        self._due = {url: due for url, due in self._due.items() if url in by_url}
        now = time.monotonic()
        return {url: streams for url, streams in by_url.items() if now >= self._due.get(url, 0.0)}

    async def _ask(self, pool: HttpPool, url: str, streams: list[StreamId]) -> None:
        pause_s, parts = _RETRY_S, urlsplit(url)
        try:
            async with self._turns:
                at, place = time.time(), await self._allowed.locate(f"tcp://{place_of(url)}")
                address = parts._replace(netloc=place.removeprefix("tcp://")).geturl()
                answer = await pool.send("GET", address, _TIMEOUT_S, {"Host": parts.netloc})
            pause_s = _ASK_EVERY_S
            if answer.status != HTTPStatus.OK:
                raise ValueError(f"status {answer.status}")  # noqa: TRY301
            args = answer.body, [stream.dp_rank for stream in streams]
            said = await asyncio.to_thread(metrics_of, *args) if len(answer.body) > _LARGE else metrics_of(*args)
            for stream, metrics in zip(streams, said, strict=True):
                self._take(stream, metrics, at)
        except (NoAnswerError, KvsightError, ValueError) as error:
            _limited_logger.warning("of %s at %s: %s", streams[0].key, url, error)
        finally:
            self._due[url] = time.monotonic() + pause_s

    def _take(self, stream: StreamId, said: EngineMetrics, at: float) -> None:
        """Keep what an engine says of a rank. Raises ValueError if it does not say all."""
        room, requests, used_tokens = said
        if room is not None:
            self._rooms[stream] = room
        if requests is not None:
            view = self._consumer.namespaces.view(stream)
            pages = 0 if view is None else -(-(used_tokens or 0) // view.block_size)
            self._reports[stream] = Report(at, requests, pages)
        if room is None or requests is None or used_tokens is None:
            raise ValueError(f"room for {room} tokens, {requests} requests, which use {used_tokens} tokens")
