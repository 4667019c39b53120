"""Chooses endpoints, `ip:port`, with kvsight, and in turn without it. No request fails because kvsight is away."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NoReturn

import msgspec

from kv_events.errors import KvsightError
from kv_events.http.selection import Selection, SelectRequest
from kvsight.calls import Call, decode
from kvsight.client import AsyncClient
from kvsight.errors import KvsightHttpError
from kvsight.selection_calls import book, complete, release, reserve

logger = logging.getLogger(__name__)

_CALLERS_FIELDS = frozenset({"cache_salt", "session_id"})
_OWN_FIELDS = frozenset(SelectRequest.__struct_fields__) - _CALLERS_FIELDS
"""Fields of a selection that a caller's body must not set."""
_MOST_ENDPOINTS, _MOST_TASKS = 3, 1024
_REFRESH_S, _SILENCE_S = 1.0, 10.0
_TOKENS = re.compile(rb"\[\s*\d")
_body_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class Picked:
    """The endpoints of a request."""

    endpoints: Sequence[str]
    """`ip:port`, the best one first. Empty: the caller chooses."""
    selection: Selection | None = None  # what is booked
    last: asyncio.Task[None] | None = None  # what is being noted about it


class _Worker(msgspec.Struct, frozen=True):
    """The part of a worker in `GET /workers` that is read here."""

    instance_id: str
    endpoint: str | None = None

    @property
    def address(self) -> str:
        """`ip:port` of its endpoint, or its name if it has none."""
        return self.instance_id if self.endpoint is None else self.endpoint.partition("://")[2].partition("/")[0]


class Picker:
    """Chooses endpoints, and books what it chooses. Belongs to one event loop, and needs `follow_workers` in a task."""

    def __init__(self, client: AsyncClient, model: str | None, tenant: str | None, deadline_s: float) -> None:
        """model: the name of the model in kvsight. None: as in each request. deadline_s: how long a choice may take."""
        self._client, self._deadline_s = client, deadline_s
        self._model, self._tenant = model, tenant
        self._addresses: Mapping[str, str] = {}  # of workers
        self._workers: Mapping[str, str] = {}  # by address
        prefix, self._turn = secrets.token_hex(8), count()
        self._names = (f"{prefix}-{number}" for number in count())  # of reservations
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent_until = 0.0

    async def pick(self, body: bytes | None, subset: Sequence[str] | None) -> Picked:
        """Choose endpoints for a request, and book it.

        body: of OpenAI's or Anthropic's API. None: unknown. subset: the only candidates. None: all workers.
        Raises KvsightHttpError (429) if the service limits the requests of the token or of the tenant.
        """
        workers = None if subset is None else [self._workers[each] for each in subset if each in self._workers]
        call = None if body is None or workers == [] or not self._workers else self._reserve(body, workers)
        if call is None:
            return self._in_turn(subset)
        name, question = call
        try:
            async with asyncio.timeout(self._deadline_s):
                return self._picked(await self._client.send(question), subset)
        except (KvsightError, OSError, asyncio.CancelledError) as error:
            if not isinstance(error, KvsightHttpError):
                self._start(release(name))  # it may be booked all the same
            if isinstance(error, asyncio.CancelledError) or getattr(error, "status", 0) == 429:
                raise
            self._note(str(error) or f"no answer within {self._deadline_s:g} s")
        return self._in_turn(subset)

    def complete(self, picked: Picked) -> None:
        """Note that the first token has come. Does not wait."""
        if picked.selection is not None:
            self._start(complete(str(picked.selection.selection_id)), picked)

    def release(self, picked: Picked) -> None:
        """Note that the request has ended. Does not wait."""
        if picked.selection is not None:
            self._start(release(str(picked.selection.selection_id)), picked)

    def served(self, picked: Picked, endpoint: str) -> Picked:
        """Note which endpoint answers. If it is another one, the booking moves there. Does not wait."""
        if picked.selection is None or endpoint == picked.endpoints[0]:
            return picked
        self.release(picked)
        if (worker := self._workers.get(endpoint)) is None:
            return Picked([endpoint])
        moved = msgspec.structs.replace(picked.selection, selection_id=next(self._names), worker_id=worker)
        served = Picked([endpoint], moved, picked.last)
        self._start(book(moved), served)
        return served

    async def follow_workers(self) -> NoReturn:
        """Learn the endpoints of the workers, again and again."""
        params = {"model_name": self._model, "routing_group": self._tenant}
        question = Call("GET", "/workers", partial(decode, list[_Worker]), params, may_repeat=False)
        while True:
            try:
                found = await self._client.send(question)
            except (KvsightError, OSError) as error:
                self._note(str(error))
                found = []  # nobody waits for a service that is away
            self._addresses = {each.instance_id: each.address for each in found}
            self._workers = {address: worker for worker, address in self._addresses.items()}
            await asyncio.sleep(_REFRESH_S)

    async def close(self) -> None:
        """Wait until what was noted is sent."""
        await asyncio.gather(*self._tasks)

    def _reserve(self, body: bytes, workers: Sequence[str] | None) -> tuple[str, Call[Selection]] | None:
        """Return the name of a new reservation and the request for it. None: the body has no prompt."""
        try:
            fields: dict[str, Any] = dict(_body_decoder.decode(body))
            model = self._model or msgspec.json.decode(fields.get("model", b""), type=str)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        for field in _OWN_FIELDS & fields.keys():
            del fields[field]
        if _TOKENS.match(fields.get("prompt", b"")):  # tokens need no engine, and no other field of the body matters
            fields = {"token_ids": fields["prompt"], **{each: fields[each] for each in fields.keys() & _CALLERS_FIELDS}}
        fields |= {"selection_id": (name := next(self._names)), "explain": True}
        return name, reserve(model, tenant=self._tenant, workers=workers, more=fields)

    def _picked(self, selection: Selection, subset: Sequence[str] | None) -> Picked:
        """Return the endpoints of the chosen worker and of the next best ones."""
        workers = selection.worker_id, *(each.worker_id for each in selection.candidates or ())
        addresses = [self._addresses.get(str(each), "") for each in workers]
        known = [each for each in dict.fromkeys(addresses) if each and (subset is None or each in subset)]
        if not known or known[0] != addresses[0]:
            self.release(Picked([], selection))
            return self._in_turn(subset)
        return Picked(known[:_MOST_ENDPOINTS], selection)

    def _in_turn(self, subset: Sequence[str] | None) -> Picked:
        first = next(self._turn) % len(subset) if subset else 0
        return Picked([*subset[first:], *subset[:first]][:_MOST_ENDPOINTS] if subset else [])

    def _note(self, trouble: str) -> None:
        """Log why kvsight does not choose, every ten seconds at most."""
        now = time.monotonic()
        if now >= self._silent_until:
            logger.warning("endpoints are chosen without kvsight: %s", trouble)
            self._silent_until = now + _SILENCE_S

    def _start(self, call: Call[None], picked: Picked | None = None) -> None:
        """Send a call in the background, after what was noted before about the same request."""
        if len(self._tasks) >= _MOST_TASKS:
            return  # the booking ends by itself after the service's time-to-live
        task = asyncio.create_task(self._send(call, None if picked is None else picked.last))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if picked is not None:
            picked.last = task

    async def _send(self, call: Call[None], earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await earlier
        with suppress(KvsightError, OSError):
            await self._client.send(call)
