"""How many pages each rank has room for: what its registration says, or else what its engine's `/metrics` say."""

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx

from api.workers.allowed_addresses import AllowedAddresses
from bridge import EngineSettings
from bridge.settings import TIERS
from kv_events.errors import KvsightError
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kv_events.schema import MEDIA
from kv_events.streams import StreamId

_limited_logger = RateLimitedLogger(logging.getLogger(__name__), "capacity")

_ASK_EVERY_S = 60.0
"""An engine that restarts may have another cache."""
_RETRY_S = 5.0
_TIMEOUT_S = 2.0
_MAX_BYTES = 8 * 2**20
_AT_ONCE = 16
_MAX_TOKENS = 2**48
_VLLM = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_SGLANG = re.compile(rb"^sglang:max_total_num_tokens(?:\{([^}]*)\})? ([0-9.e+]{1,24})", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')

Pages = Mapping[str, int]
"""Medium -> pages that a rank has room for. Media that are not named are unknown."""


class Capacities:
    """The tokens for which engines have room, from those of their `/metrics` that are named. One event loop calls it.

    A rank's registration comes first. Each request goes to an address that `allowed` has judged.
    """

    def __init__(self, engines: Mapping[StreamId, EngineSettings], allowed: AllowedAddresses) -> None:
        """engines: the registered ranks, read anew each time."""
        self._engines = engines
        self._allowed = allowed
        self._tokens: dict[StreamId, int] = {}
        self._asked_at: dict[StreamId, float] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def pages(self, stream: StreamId, block_size: int) -> Pages:
        """Return what is known of a rank."""
        engine = self._engines.get(stream)
        found = {} if engine is None else dict(zip(MEDIA, map(engine.capacity.get, TIERS), strict=True))
        if engine is not None and found[MEDIA[0]] is None and block_size and stream in self._tokens:
            found[MEDIA[0]] = self._tokens[stream] // block_size
        return {medium.value: pages for medium, pages in found.items() if pages}

    async def follow(self) -> None:
        """Ask engines forever."""
        while True:
            now = time.monotonic()
            for gone in self._asked_at.keys() - self._engines.keys():
                del self._asked_at[gone]
                self._tokens.pop(gone, None)
            due = [
                (stream, each)
                for stream, each in self._engines.items()
                if each.metrics_url is not None
                and now - self._asked_at.get(stream, -_ASK_EVERY_S)
                >= (_ASK_EVERY_S if stream in self._tokens else _RETRY_S)
            ]
            await asyncio.gather(*(self._ask(*each) for each in due))
            await asyncio.sleep(1.0)

    async def _ask(self, stream: StreamId, engine: EngineSettings) -> None:
        assert engine.metrics_url is not None
        self._asked_at[stream] = time.monotonic()
        try:
            async with self._turns, asyncio.timeout(_TIMEOUT_S):
                text = await _read(engine.metrics_url, self._allowed)
            self._tokens[stream] = tokens_of(text, engine.dp_rank)
        except (httpx.HTTPError, httpx.InvalidURL, KvsightError, TimeoutError, ValueError) as error:
            what = str(error) or type(error).__name__
            _limited_logger.warning("the capacity of %s is not known: %s: %s", stream.key, engine.metrics_url, what)


def tokens_of(text: bytes, dp_rank: int) -> int:
    """Return for how many tokens a rank has room on its device, from `/metrics` of vLLM or SGLang. Raises ValueError.

    Without a label for the rank, the first sample counts.
    """
    found: dict[bytes, int] = {}
    for labels, blocks in ((dict(_LABEL.findall(each)), b"") for each in _VLLM.findall(text)):
        if (blocks := labels.get(b"num_gpu_blocks", b"")).isdigit() and labels.get(b"block_size", b"").isdigit():
            found.setdefault(labels.get(b"engine", b""), int(blocks) * int(labels[b"block_size"]))
    for given, number in _SGLANG.findall(text):
        found.setdefault(dict(_LABEL.findall(given)).get(b"dp_rank", b""), int(min(float(number), _MAX_TOKENS)))
    if not found:
        raise ValueError("neither vllm:cache_config_info with num_gpu_blocks nor sglang:max_total_num_tokens is there")
    tokens = found.get(b"%d" % dp_rank, next(iter(found.values())))
    if not 0 < tokens < _MAX_TOKENS:
        raise ValueError(f"{tokens} tokens")
    return tokens


async def _read(url: str, allowed: AllowedAddresses) -> bytes:
    """Return a text of bounded size. Raises httpx.HTTPError, KvsightError, ValueError."""
    parts, text = urlsplit(url), bytearray()
    place = await allowed.locate(f"tcp://{place_of(url)}")
    address = parts._replace(netloc=place.removeprefix("tcp://")).geturl()
    async with (
        httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client,
        client.stream("GET", address, headers={"Host": parts.netloc, "Accept-Encoding": "identity"}) as response,
    ):
        response.raise_for_status()
        async for part in response.aiter_raw():
            text += part
            if len(text) > _MAX_BYTES:
                raise ValueError(f"more than {_MAX_BYTES} bytes")
    return bytes(text)


def place_of(url: str) -> str:
    """Return HOST:PORT of an address that starts with http://."""
    netloc = urlsplit(url).netloc
    return netloc if re.search(r":\d+$", netloc) else f"{netloc}:80"
