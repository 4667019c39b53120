"""What engines say of themselves in their `/metrics`, read about once a second: their room and their load."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from api.workers.allowed_addresses import AllowedAddresses
from api.workers.engine_metrics import EngineLoad, load_of, place_of, tokens_of
from kv_events.errors import KvsightError
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kv_events.schema import MEDIA
from kv_events.streams import StreamId

_limited_logger = RateLimitedLogger(logging.getLogger(__name__), "engine metrics")

_ASK_EVERY_S = 1.0
_RETRY_S = 5.0
_LOOK_EVERY_S = 0.25
_FRESH_S = 5.0
"""Age at which a load is no longer believed."""
_TIMEOUT_S = 2.0
_MAX_BYTES = 8 * 2**20
_AT_ONCE = 64
_DEVICE = MEDIA[0].value

Pages = Mapping[str, int]
"""Medium -> pages that a rank has room for. Media that are not named are unknown."""


class Report(NamedTuple):
    """The load of a rank as its engine says it, with the requests of all callers."""

    requests: int
    waiting: int
    """Those of the requests that are not computed yet."""
    used_pages: int | None
    """Pages of the device that the requests use. None: unknown."""
    at: float
    """When the engine was asked, on the clock of `time.monotonic`."""


class Reports:
    """The newest answers of engines. One event loop calls it. Each request goes to an address that `allowed` judged."""

    def __init__(
        self,
        urls: Callable[[], Mapping[StreamId, str]],
        registered: Callable[[StreamId], Pages],
        allowed: AllowedAddresses,
    ) -> None:
        """urls: returns the address of the metrics of each rank. registered: returns what is known of a rank's room."""
        self.on_report: Callable[[StreamId], None] = lambda _stream: None
        """Is called for each new report, to note what is booked at that time."""
        self._urls = urls
        self._registered = registered
        self._allowed = allowed
        self._tokens: dict[StreamId, int] = {}
        self._loads: dict[StreamId, tuple[EngineLoad, float]] = {}
        self._due: dict[str, float] = {}  # by address; infinite while it is asked
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def pages(self, stream: StreamId, block_size: int) -> Pages:
        """Return what is known of the room of a rank. Its registration comes first."""
        found = self._registered(stream)
        if _DEVICE in found or not block_size or stream not in self._tokens:
            return found
        pages = self._tokens[stream] // block_size
        return {**found, _DEVICE: pages} if pages else found

    def of(self, stream: StreamId, block_size: int) -> Report | None:
        """Return the load of a rank. None: its engine has not said it for five seconds. block_size: tokens a page."""
        load, at = self._loads.get(stream, (None, 0.0))
        if load is None or time.monotonic() - at > _FRESH_S:
            return None
        pages = None if load.used_tokens is None else -(-load.used_tokens // block_size)
        return Report(load.requests, load.waiting, pages, at)

    async def follow(self) -> None:
        """Ask engines forever."""
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client, asyncio.TaskGroup() as group:
            while True:
                urls, by_url = self._urls(), dict[str, list[StreamId]]()
                for stream, url in urls.items():
                    by_url.setdefault(url, []).append(stream)
                self._tokens = {stream: tokens for stream, tokens in self._tokens.items() if stream in urls}
                self._loads = {stream: load for stream, load in self._loads.items() if stream in urls}
                self._due = {url: due for url, due in self._due.items() if url in by_url}
                for url, streams in by_url.items():
                    if time.monotonic() >= self._due.get(url, 0.0):
                        self._due[url] = float("inf")
                        group.create_task(self._ask(client, url, streams), name=f"metrics:{url}")
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _ask(self, client: httpx.AsyncClient, url: str, streams: list[StreamId]) -> None:
        pause_s = _RETRY_S
        try:
            async with self._turns, asyncio.timeout(_TIMEOUT_S):
                at = time.monotonic()
                text = await _read(client, url, self._allowed)
            pause_s = _ASK_EVERY_S
            for stream in streams:
                self._take(stream, text, at)
        except (httpx.HTTPError, httpx.InvalidURL, KvsightError, TimeoutError, ValueError) as error:
            what = str(error) or type(error).__name__
            _limited_logger.warning("of %s at %s: %s", streams[0].key, url, what)
        finally:
            self._due[url] = time.monotonic() + pause_s

    def _take(self, stream: StreamId, text: bytes, at: float) -> None:
        """Keep what an answer says of a rank. Raises ValueError if the answer lacks something."""
        try:
            self._tokens[stream] = tokens_of(text, stream.dp_rank)
        finally:
            self._loads[stream] = load_of(text, stream.dp_rank, self._tokens.get(stream)), at
            self.on_report(stream)


async def _read(client: httpx.AsyncClient, url: str, allowed: AllowedAddresses) -> bytes:
    """Return a text of bounded size. Raises httpx.HTTPError, KvsightError, ValueError."""
    parts, text = urlsplit(url), bytearray()
    place = await allowed.locate(f"tcp://{place_of(url)}")
    address = parts._replace(netloc=place.removeprefix("tcp://")).geturl()
    headers = {"Host": parts.netloc, "Accept-Encoding": "identity"}
    async with client.stream("GET", address, headers=headers) as response:
        response.raise_for_status()
        async for part in response.aiter_raw():
            text += part
            if len(text) > _MAX_BYTES:
                raise ValueError(f"more than {_MAX_BYTES} bytes")
    return bytes(text)
