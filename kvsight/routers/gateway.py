"""SMG, the gateway of SGLang: which number names a worker in a request that it passes on."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

import msgspec

from api.http_pool import HttpPool, NoAnswerError
from kv_events.runtime.outages import RateLimitedLogger
from kvsight.base_client import address_and_authorization
from kvsight.routers.placement import address_of

TARGET = "X-SMG-Target-Worker"
"""Header of a request: the number of the worker that gets it, with the policy consistent_hashing."""
_LIST_EVERY_S, _DEADLINE_S, _MAX_ANSWER_BYTES = 2.0, 0.25, 2**24
_warnings = RateLimitedLogger(logging.getLogger(__name__), "the gateway chooses")


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
