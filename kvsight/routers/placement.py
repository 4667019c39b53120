"""Where requests go: the selection service, asked within a deadline. What adapters in Python share."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec

from api.http_pool import HttpPool, NoAnswerError
from kv_events.errors import KvsightError
from kv_events.http.selection import Selection, SelectRequest
from kv_events.http.service import DEFAULT_URL
from kv_events.runtime.outages import RateLimitedLogger
from kvsight import calls
from kvsight.base_client import address_and_authorization
from kvsight.calls import Call
from kvsight.errors import KvsightHttpError
from kvsight.prompts import given

T = TypeVar("T")
C = TypeVar("C")

DEADLINE_S = 0.25
"""Longer than the 0.2 s that the service waits for the tokens of a text."""
_LIST_EVERY_S, _CALL_S = 2.0, 2.0
_FAILURES, _SILENT_S = 3, 1.0  # after so many without an answer between them, the service is not asked for so long
_AWAY_S = 5.0
_MOST_NOTED, _MAX_ANSWER_BYTES = 4096, 2**26
_OURS = frozenset(SelectRequest.__struct_fields__) - {"lora_name", "cache_salt", "session_id"}
"""Fields of a selection that callers of an engine do not choose."""
_IS_ADDRESS = re.compile(r"[\w.-]+:\d+|\[[\da-fA-F:]+\]:\d+")
_TOKENS = re.compile(rb"\[\s*\d")
_body_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_warnings = RateLimitedLogger(logging.getLogger(__name__), "requests go without kvsight")


class KnownWorker(NamedTuple):
    """A worker that takes requests."""

    url: str
    """As `address_of` returns it. Empty: the service does not know it."""
    model: str
    """Empty: the service does not know this worker."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A request that was booked."""

    workers: tuple[str, ...]
    """The chosen one, and the next best ones."""
    selection: Selection

    @property
    def worker(self) -> str:
        """The chosen one."""
        return self.workers[0]

    @property
    def selection_id(self) -> str:
        """The name of its reservation."""
        return str(self.selection.selection_id)


def address_of(url: str | None) -> str:
    """Return an address without `/` and `/v1` at its end."""
    return (url or "").rstrip("/").removesuffix("/v1").rstrip("/")


def body_of(content: bytes) -> Mapping[str, Any] | None:
    """Return the fields of a JSON body, which are decoded no further. None: it is no object."""
    try:
        return _body_decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def model_of(body: Mapping[str, Any]) -> str | None:
    """Return the model that a body names."""
    model = body.get("model")
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        model = msgspec.json.decode(model) if isinstance(model, msgspec.Raw) else model
    return model if isinstance(model, str) else None


class Placement:
    """Asks the service where requests go. No request waits longer than the deadline. Belongs to one event loop."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        deadline_s: float = DEADLINE_S,
        workers: Mapping[str, str] | None = None,
        tenant: str | None = None,
    ) -> None:
        """url, token: of the service. None: those of KVSIGHT_URL and KVSIGHT_API_TOKEN.

        workers: name -> address, of those whose address the service does not know. Raises InvalidValueError.
        """
        url, token = url or os.environ.get("KVSIGHT_URL", DEFAULT_URL), token or os.environ.get("KVSIGHT_API_TOKEN")
        self._url, self._headers = address_and_authorization(url, token)
        self._pool = HttpPool(_MAX_ANSWER_BYTES)
        self._tenant = tenant
        self._deadline_s = deadline_s
        self._given = {name: KnownWorker(address_of(at), "") for name, at in (workers or {}).items()}
        self._known = dict(self._given)
        self._addressed = dict(self._given)
        self._names: dict[str, str] = {}  # what routers may call a worker -> its name
        self._is_listed = False  # by the service
        self._listing: asyncio.Task[None] | None = None
        self._listed_at = self._silent_until = -math.inf
        self._num_failures = 0  # since the last answer
        self._away_until: dict[str, float] = {}
        self._noted: dict[str, asyncio.Task[None]] = {}  # by reservation, what is being sent about it

    async def workers(self) -> Mapping[str, KnownWorker]:
        """Return the workers with an address that take new requests, as last heard.

        Calls before the first list wait for it.
        """
        now = time.monotonic()
        if self._listing is None or now > self._listed_at + _LIST_EVERY_S:
            self._listed_at, self._listing = now, asyncio.create_task(self._list())
        if not self._is_listed:
            await asyncio.wait([self._listing], timeout=self._deadline_s)
        return self._addressed

    async def by_worker(self, candidates: Sequence[C], called: Callable[[C], str]) -> dict[str, list[C]]:
        """Return the candidates of each worker. Empty: the router chooses otherwise.

        called: what the router calls a candidate: the name of a worker, its address, or the address of its events.
        The choice is the router's if no candidate is known. If some are not, it is now and then, so that their engines
        are used, and become known.
        """
        await self.workers()
        found: dict[str, list[C]] = {}
        for each in candidates:
            found.setdefault(self._names.get(address_of(called(each)), ""), []).append(each)
        others = found.pop("", [])
        if others and not found:
            _warnings.warning("no candidate is a worker that the service knows: %s", called(others[0]))
        return {} if secrets.randbelow(len(candidates) or 1) < len(others) else found

    def present(self, workers: Collection[str]) -> list[str]:
        """Return those that did not fail lately, or all if all did."""
        now = time.monotonic()
        return [each for each in workers if self._away_until.get(each, 0.0) <= now] or list(workers)

    def leave_out(self, worker: str) -> None:
        """Give a worker that failed no requests for five seconds."""
        self._away_until[worker] = time.monotonic() + _AWAY_S

    async def place(self, body: Mapping[str, Any], workers: Collection[str]) -> Placed | None:
        """Choose one of some workers for a request, and book it. None: choose otherwise. Never raises.

        body: what the engine gets, or what `body_of` returned.
        """
        with suppress(KvsightHttpError):
            return await self.place_within_limits(body, workers)
        return None

    async def place_within_limits(self, body: Mapping[str, Any], workers: Collection[str]) -> Placed | None:
        """Place a request. Raises KvsightHttpError (429) if the service limits the requests of the tenant or token."""
        if not workers or time.monotonic() < self._silent_until:
            return None
        selection_id = uuid.uuid4().hex
        try:
            selection = await self._ask(self._reserve(body, workers, selection_id), self._deadline_s)
        except (KvsightHttpError, TypeError, ValueError, RecursionError) as error:
            _warnings.warning("the service refuses, or the body cannot be sent: %s", error)
            if isinstance(error, KvsightHttpError) and error.status == 429:
                raise
            return None
        except (asyncio.CancelledError, NoAnswerError, KvsightError) as error:
            asyncio.get_running_loop().call_later(_SILENT_S, self.release, selection_id)  # it may still be booked
            if isinstance(error, asyncio.CancelledError):
                raise
            self._num_failures += 1
            if self._num_failures >= _FAILURES:
                self._silent_until = time.monotonic() + _SILENT_S
            _warnings.warning("%s", error)
            return None
        self._num_failures = 0
        found = [selection.worker_id, *(each.worker_id for each in selection.candidates or ())]
        return Placed(tuple(dict.fromkeys(map(str, found))), selection)

    def complete(self, selection_id: str) -> None:
        """Note in the background that the first token of a request has come."""
        self._note(selection_id, calls.complete(selection_id))

    def release(self, selection_id: str) -> None:
        """Release a reservation in the background. If that fails, it ends after the service's time-to-live."""
        self._note(selection_id, calls.release(selection_id))

    def move(self, placed: Placed, worker: str) -> Placed:
        """Book a request on another worker, which serves it, in the background. Returns the new booking."""
        self.release(placed.selection_id)
        moved = msgspec.structs.replace(placed.selection, selection_id=uuid.uuid4().hex, worker_id=worker)
        self._note(str(moved.selection_id), calls.book(moved))
        return Placed((worker,), moved)

    async def aclose(self) -> None:
        """Wait for what is under way, and close the connections."""
        if tasks := [*self._noted.values(), *([self._listing] if self._listing else ())]:
            await asyncio.wait(tasks, timeout=_CALL_S)
        await self._pool.close()

    def _reserve(self, body: Mapping[str, Any], workers: Collection[str], selection_id: str) -> Call[Selection]:
        """Return the request for a reservation. Its model is the one that all candidates have, if they have one."""
        models = {known.model for name in workers if (known := self._known.get(name)) and known.model}
        model = models.pop() if len(models) == 1 else model_of(body) or "default"
        fields = {name: value for name, value in body.items() if name not in _OURS}
        prompt = fields.get("prompt")
        if _is_tokens(prompt):  # they need no engine, and no other field of the body matters
            fields = {name: fields[name] for name in ("cache_salt", "lora_name", "session_id") if name in fields}
            fields["token_ids"] = prompt
        fields |= {"selection_id": selection_id, "explain": True}
        return calls.reserve(model, tenant=self._tenant, workers=self.present(workers), more=fields)

    async def _list(self) -> None:
        try:
            listed = await self._ask(calls.workers(tenant=self._tenant), _CALL_S)
        except (NoAnswerError, KvsightError) as error:
            _warnings.warning("the workers stay as they were: %s", error)
            return
        known, events = dict(self._given), dict[str, str]()
        for each in listed:
            given = known.pop(each.instance_id, None)
            named = f"http://{each.instance_id}" if _IS_ADDRESS.fullmatch(each.instance_id) else None
            address = given.url if given else address_of(each.endpoint or named)
            if each.is_schedulable:
                known[each.instance_id] = KnownWorker(address, each.model_name)
                events.update(dict.fromkeys(each.endpoints.values(), each.instance_id))
        self._known, self._is_listed = known, True
        self._addressed = {name: worker for name, worker in known.items() if worker.url}
        self._names = (
            events | {each.url: name for name, each in self._addressed.items()} | {name: name for name in known}
        )

    def _note(self, selection_id: str, call: Call[None]) -> None:
        """Send a call in the background, after what was noted before about the same reservation."""
        earlier = self._noted.get(selection_id)
        if len(self._noted) < _MOST_NOTED or earlier is not None:
            self._noted[selection_id] = task = asyncio.create_task(self._send(call, earlier))
            task.add_done_callback(partial(self._forget, selection_id))

    def _forget(self, selection_id: str, task: asyncio.Task[None]) -> None:
        if self._noted.get(selection_id) is task:
            del self._noted[selection_id]

    async def _send(self, call: Call[None], earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await earlier
        with suppress(NoAnswerError, KvsightError):
            await self._ask(call, _CALL_S)

    async def _ask(self, call: Call[T], deadline_s: float) -> T:
        """Raises NoAnswerError, KvsightHttpError, UnexpectedAnswerError."""
        params = urlencode(given(call.params or {}))
        headers = self._headers if call.content_type is None else self._headers | {"Content-Type": call.content_type}
        target = f"{self._url}{call.path}{'?' if params else ''}{params}"
        answer = await self._pool.send(call.method, target, deadline_s, headers, call.content or b"")
        return call.result(self._url, answer.status, answer.body)


def _is_tokens(prompt: Any) -> bool:
    if isinstance(prompt, msgspec.Raw):
        return _TOKENS.match(prompt) is not None
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
