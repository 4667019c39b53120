"""Where requests go: the selection service, asked within a deadline. What adapters in Python share."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Collection, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from kv_events.errors import KvsightError
from kv_events.http.selection import SelectRequest
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kvsight.base_client import RetryPolicy
from kvsight.client import AsyncClient
from kvsight.errors import KvsightHttpError

DEADLINE_S = 0.25
"""Longer than the 0.2 s that the service waits for the tokens of a text."""
_LIST_EVERY_S = 2.0
_FAILURES, _SILENT_S = 3, 1.0  # after so many without an answer between them, the service is not asked for so long
_AWAY_S = 5.0
_OURS = frozenset(SelectRequest.__struct_fields__) - {"lora_name", "cache_salt", "session_id"}
"""Fields of a selection that callers of an engine do not choose."""
_warnings = RateLimitedLogger(logging.getLogger(__name__), "requests go without kvsight")


class KnownWorker(NamedTuple):
    """A worker that takes requests."""

    url: str
    """As `address_of` returns it."""
    model: str
    """Empty: the service does not know this worker."""


class Placed(NamedTuple):
    """A request that was booked on a worker."""

    worker: str
    selection_id: str


def address_of(url: str | None) -> str:
    """Return an address without `/` and `/v1` at its end."""
    return (url or "").rstrip("/").removesuffix("/v1").rstrip("/")


class Placement:
    """Asks the service where requests go. Nothing here raises or waits longer. Belongs to one event loop."""

    def __init__(
        self, url: str, *, token: str | None, deadline_s: float = DEADLINE_S, workers: Mapping[str, str] | None = None
    ) -> None:
        """workers: name -> address, of those whose address the service does not know. Raises InvalidValueError."""
        self._client = AsyncClient(url, token=token, timeout_s=deadline_s, retry=RetryPolicy(attempts=1))
        self._deadline_s = deadline_s
        self._given = {name: KnownWorker(address_of(at), "") for name, at in (workers or {}).items()}
        self._known = dict(self._given)
        self._is_listed = False  # by the service
        self._listing: asyncio.Task[None] | None = None
        self._listed_at = self._silent_until = -math.inf
        self._num_failures = 0  # since the last answer
        self._away_until: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def workers(self) -> Mapping[str, KnownWorker]:
        """Return the workers that take new requests, as last heard. Calls before the first list wait for it."""
        now = time.monotonic()
        if self._listing is None or now > self._listed_at + _LIST_EVERY_S:
            self._listed_at, self._listing = now, self._spawn(self._list())
        if not self._is_listed:
            await asyncio.wait([self._listing], timeout=self._deadline_s)
        return self._known

    def present(self, workers: Collection[str]) -> list[str]:
        """Return those that did not fail lately, or all if all did."""
        now = time.monotonic()
        return [each for each in workers if self._away_until.get(each, 0.0) <= now] or list(workers)

    def leave_out(self, worker: str) -> None:
        """Give a worker that failed no requests for five seconds."""
        self._away_until[worker] = time.monotonic() + _AWAY_S

    async def place(self, body: Mapping[str, Any], workers: Collection[str]) -> Placed | None:
        """Choose one of some workers for the body of a request to an engine, and book it. None: choose otherwise."""
        if not workers or time.monotonic() < self._silent_until:
            return None
        selection_id = uuid.uuid4().hex
        models = {known.model for name in workers if (known := self._known.get(name)) and known.model}
        model = models.pop() if len(models) == 1 else str(body.get("model", "default"))
        fields = {name: value for name, value in body.items() if name not in _OURS} | {"selection_id": selection_id}
        try:
            async with asyncio.timeout(self._deadline_s):
                found = await self._client.reserve(model, workers=self.present(workers), more=fields)
        except (KvsightHttpError, TypeError, ValueError, RecursionError) as error:
            _warnings.warning("the service refuses, or the body cannot be sent: %s", error)
            return None
        except (TimeoutError, KvsightError) as error:
            self._num_failures += 1
            if self._num_failures >= _FAILURES:
                self._silent_until = time.monotonic() + _SILENT_S
            asyncio.get_running_loop().call_later(_SILENT_S, self.release, selection_id)  # it may still be booked
            _warnings.warning("%s", str(error) or f"no answer within {self._deadline_s:g} s")
            return None
        self._num_failures = 0
        return Placed(str(found.worker_id), selection_id)

    def complete(self, selection_id: str) -> None:
        """Note in the background that the first token of a request has come."""
        self._spawn(self._quietly(self._client.complete(selection_id)))

    def release(self, selection_id: str) -> None:
        """Release a reservation in the background. If that fails, it ends after the service's time-to-live."""
        self._spawn(self._quietly(self._client.release(selection_id)))

    async def aclose(self) -> None:
        """Wait for what is under way, and close the connections."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._deadline_s)
        await self._client.aclose()

    async def _list(self) -> None:
        try:
            listed = await self._client.workers()
        except KvsightError as error:
            _warnings.warning("the workers stay as they were: %s", error)
            return
        known = dict(self._given)
        for each in listed:
            given = known.pop(each.instance_id, None)
            if each.is_schedulable and (address := given.url if given else address_of(each.endpoint)):
                known[each.instance_id] = KnownWorker(address, each.model_name)
        self._known, self._is_listed = known, True

    async def _quietly(self, call: Coroutine[Any, Any, None]) -> None:
        with suppress(KvsightError):
            await call

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
