"""What vLLM and SGLang say of themselves in their `/metrics`, read about once a second: their room and their load."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

from api.http_pool import HttpPool, NoAnswerError
from api.workers.allowed_addresses import AllowedAddresses
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

_MOST = 2**48
# linear: a sample begins a line and ends in it, and a label begins a word
_SAMPLE = re.compile(
    rb"^(?:vllm:(cache_config_info|num_requests_running|num_requests_waiting|kv_cache_usage_perc)"
    rb"|sglang:(max_total_num_tokens|num_running_reqs|num_queue_reqs|token_usage|num_used_tokens))"
    rb"(?:\{(.*)\})? ([0-9.e+-]{1,24})",
    re.MULTILINE,
)
_LABEL = re.compile(rb'\b(\w+)="([^"]*)"')


class EngineMetrics(NamedTuple):
    """What an engine says of one of its ranks. None: it does not say it, or nothing that can be true."""

    room: int | None
    """Tokens for which its device has room."""
    requests: int | None
    """Running and waiting ones."""
    used_tokens: int | None
    """Tokens in the pages of the device that these requests use."""


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
        return 0 if self._shares(stream) else self._rooms.get(stream, 0)

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

    def _shares(self, stream: StreamId) -> bool:
        """Return whether pages of other attention groups take a part of the room, and of what is used of it."""
        of_model = self._consumer.namespaces.find(stream.model, stream.tenant)
        groups = (group for each in of_model for group in each.groups.values())
        views = (group.by_rank.get((stream.worker, stream.dp_rank)) for group in groups)
        return any(view is not None and any(view.num_pages) for view in views)

    def _take(self, stream: StreamId, said: EngineMetrics, at: float) -> None:
        """Keep what an engine says of a rank. Raises ValueError if it does not say all."""
        room, requests, used_tokens = said
        if room is not None:
            self._rooms[stream] = room
        if requests is not None:
            view, pages = self._consumer.namespaces.view(stream), None
            if view is not None and used_tokens is not None and not self._shares(stream):
                pages = -(-used_tokens // view.block_size)
            self._reports[stream] = Report(at, requests, pages)
        if missing := [name for name, value in said._asdict().items() if value is None]:
            raise ValueError(f"they do not tell {', '.join(missing)}")


def metrics_of(text: bytes, dp_ranks: Iterable[int]) -> list[EngineMetrics]:
    """Return what vLLM or SGLang say of each rank. Without a label for a rank, the first sample of a name counts.

    Raises ValueError for a sample without a number.
    """
    samples: dict[bytes, dict[bytes, float]] = {}
    for sample in _SAMPLE.finditer(text):  # lets other threads run, as `findall` does not
        vllm, sglang, given, number = sample.groups(b"")
        labels: dict[bytes, bytes] = dict(_LABEL.findall(given))
        value = float(number)
        if vllm == b"cache_config_info":
            blocks, size = labels.get(b"num_gpu_blocks", b""), labels.get(b"block_size", b"")
            value = float(blocks) * float(size) if blocks.isdigit() and size.isdigit() else -1.0
        rank = labels.get(b"engine", labels.get(b"dp_rank", b""))
        samples.setdefault(vllm or sglang, {}).setdefault(rank, value)

    def of_rank(rank: bytes, *names: bytes) -> float:
        found = next((samples[name] for name in names if name in samples), {b"": -1.0})
        return found.get(rank, next(iter(found.values())))

    said = []
    for rank in (b"%d" % dp_rank for dp_rank in dp_ranks):
        room = _believed(of_rank(rank, b"cache_config_info", b"max_total_num_tokens")) or None
        names = (b"num_requests_running", b"num_running_reqs"), (b"num_requests_waiting", b"num_queue_reqs")
        counts = [of_rank(rank, *each) for each in names]
        used = of_rank(rank, b"num_used_tokens")
        if used < 0 and room is not None:
            used = room * of_rank(rank, b"kv_cache_usage_perc", b"token_usage")
        said.append(EngineMetrics(room, _believed(sum(counts) if min(counts) >= 0 else -1.0), _believed(used)))
    return said


def _believed(value: float) -> int | None:
    return round(value) if 0 <= value < _MOST else None


def place_of(url: str) -> str:
    """Return HOST:PORT of an address of HTTP."""
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.netloc if re.search(r":\d+$", parts.netloc) else f"{parts.netloc}:{default}"
