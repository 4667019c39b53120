"""The records of workers: where they take requests, and whether they may get new ones.

A worker that only its events name has no record. It may get requests, and its address is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import UNSET, structs

from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import JSON, decode_as
from api.selection.answers import worker_name
from api.settings import RegistrationSettings
from api.workers.allowed_addresses import AllowedAddresses
from api.workers.reports import Reports
from indexer.consumer import Consumer
from indexer.views import ViewState
from kv_events.engine_wire import endpoint_of_rank
from kv_events.errors import InvalidValueError
from kv_events.http.workers import WorkerRecord
from kv_events.runtime.supervised import in_background, keep_running
from kv_events.schema import MEDIA
from kv_events.streams import StreamId, split_group
from selection.roster import Report

if TYPE_CHECKING:
    from api.workers.registrations import Registrations
    from bridge import EngineSettings

logger = logging.getLogger(__name__)

_MOST_CHECKED = 4  # records at a time
_AT_ONCE = 16  # ranks of each
_Checked: TypeAlias = "tuple[Mapping[StreamId, EngineSettings], InvalidValueError | ProblemError | None]"
"""The ranks of a record that are to be read, and why they cannot be."""


class WorkerRecords:
    """The records by worker. Belongs to the consumer's event loop. Implements `selection.roster.Directory`."""

    def __init__(
        self, consumer: Consumer, settings: RegistrationSettings, registrations: Registrations | None = None
    ) -> None:
        """registrations: engines that this process reads itself, with which records are saved. Those that the operator
        has named with a `url` have records. None: it reads a log, and forgets the records when it ends.
        """
        self._consumer = consumer
        self._most = settings.max_registrations
        self._registrations = registrations
        self._records: dict[str, WorkerRecord] = {} if registrations is None else registrations.records
        self._engines: Mapping[StreamId, EngineSettings] = {} if registrations is None else registrations.engines
        self._lock = asyncio.Lock()  # one change at a time
        self._turns = asyncio.Semaphore(_MOST_CHECKED)
        self._num_changes = 0
        self._urls: tuple[int, Mapping[StreamId, str]] = -1, {}  # of the metrics, and `generation` when they were found
        self._kept: dict[str, tuple[tuple[int, ...], WorkerRecord]] = {}  # what `_judged` returned, and why
        self._reports = Reports(
            consumer,
            self._metrics_urls,
            AllowedAddresses(settings.register_allow) if registrations is None else registrations.allowed,
        )

    def running(self) -> AbstractAsyncContextManager[None]:
        """Read the engines' metrics inside the block."""
        return in_background(keep_running(self._reports.follow, "engine metrics", logger), "engine-metrics")

    @property
    def generation(self) -> int:
        """A number that grows with every change of a record and of the registered ranks."""
        return self._num_changes + (0 if self._registrations is None else self._registrations.num_changes)

    def get(self, worker: str, model: str, tenant: str) -> WorkerRecord | None:
        """Return the record of a worker as of now. None: it has none for this model and tenant."""
        record = self._records.get(worker)
        return self._judged(record) if record is not None and _scope(record) == (model, tenant) else None

    def report(self, rank: StreamId) -> Report | None:
        """Return the load of a rank. None: its engine has not said it for five seconds."""
        return self._reports.of(rank)

    def all(self) -> list[WorkerRecord]:
        """Return all records as of now."""
        return [self._judged(record) for record in self._records.values()]

    def num_schedulable(self) -> int:
        """Return the number of workers that get new requests."""
        state, views = self._consumer.freshness.state, self._consumer.namespaces.views
        streams = (view.stream for view in views if state(view) is not ViewState.EXPIRED)
        known = {(each.worker, each.model, each.tenant) for each in streams if split_group(each.model)[1] is None}
        known |= {(name, each.model_name, each.routing_group) for name, each in self._records.items()}
        return sum(record is None or record.is_schedulable for record in (self.get(*each) for each in known))

    def pages(self, stream: StreamId, block_size: int) -> Mapping[str, int]:
        """Return for how many pages a rank has room, by medium: as registered, as in its record, or as it says itself.

        Media that are not named are unknown.
        """
        record = self._records.get(stream.worker)
        is_named = record is not None and stream[:2] == _scope(record) and stream.dp_rank in record.ranks
        named = record.total_kv_blocks if record is not None and is_named else None
        pages = named or (self._reports.room(stream) // block_size if block_size else 0)
        found = {MEDIA[0].value: pages} if pages else {}
        return found if self._registrations is None else found | self._registrations.room(stream)

    async def put(self, record: WorkerRecord) -> WorkerRecord:
        """Add or replace a record, and read the ranks whose addresses it names. Raises ProblemError (403, 409, 503).

        A record with other faults is kept, and its `not_schedulable_reasons` name them.
        """
        checked = await self._checked(record)
        async with self._lock:
            return await self._put(record, checked)

    async def patch(self, worker: str, given: Mapping[str, Any]) -> WorkerRecord:
        """Change fields of a record. None leaves a field. Raises ProblemError (404, 422), and as `put`."""
        while True:
            record = self._merged(worker, given)
            checked = await self._checked(record)
            async with self._lock:
                if record == self._merged(worker, given):  # otherwise another request has changed it meanwhile
                    return await self._put(record, checked)

    def _merged(self, worker: str, given: Mapping[str, Any]) -> WorkerRecord:
        own = structs.asdict(self._known(worker))
        identity = {name: own[name] for name in ("worker_id", "model_name", "routing_group")}
        merged = own | {name: value for name, value in given.items() if value is not None} | identity
        encoded = msgspec.json.encode({name: value for name, value in merged.items() if value is not UNSET})
        return decode_as(WorkerRecord, encoded, JSON)

    def _check_room(self, record: WorkerRecord) -> None:
        """Raises ProblemError (409) if there is no room for a record, or if the worker has one of another scope."""
        worker = str(record.worker_id)
        before = self._records.get(worker)
        if before is not None and _scope(before) != _scope(record):
            scope = f"model={before.model_name} routing_group={before.routing_group}"
            detail = f"worker {worker} is already registered for {scope}"
            raise ProblemError(409, ProblemKind.ALREADY_REGISTERED, detail, "worker_id", record.worker_id)
        both = self._records, self._records | {worker: record}
        now, then = (sum(max(1, len(each.ranks)) for each in records.values()) for records in both)
        if then > max(now, self._most):
            detail = f"data_parallel_size: records may have {self._most} ranks in all (--max-registrations), not {then}"
            value = "data_parallel_size", len(record.ranks)
            raise ProblemError(409, ProblemKind.TOO_MANY_REGISTRATIONS, detail, *value)

    async def _checked(self, record: WorkerRecord) -> _Checked:
        """Check a record and its addresses, outside the lock, because this takes up to some seconds a rank."""
        self._check_room(record)
        if self._registrations is None or self._lacks(record):
            return {}, None
        try:
            wanted = self._engines_of(record)
            new = [engine for stream, engine in wanted.items() if self._engines.get(stream) != engine]
            await self._check_addresses(new, self._registrations.allowed)
        except (InvalidValueError, ProblemError) as error:
            return {}, error
        return wanted, None

    async def _check_addresses(self, engines: list[EngineSettings], allowed: AllowedAddresses) -> None:
        from api.workers.registration_rules import check_addresses, check_speaks_zmq

        for judge in (check_addresses, check_speaks_zmq):
            for start in range(0, len(engines), _AT_ONCE):
                async with self._turns:
                    judged = (judge(each, allowed) for each in engines[start : start + _AT_ONCE])
                    failures = await asyncio.gather(*judged, return_exceptions=True)
                if failure := next(filter(None, failures), None):
                    raise failure

    async def _put(self, record: WorkerRecord, checked: _Checked) -> WorkerRecord:
        self._check_room(record)
        worker, (wanted, failure) = str(record.worker_id), checked
        if self._registrations is not None and failure is None:
            before = self._records.get(worker)
            try:
                await self._registrations.replace(() if before is None else _sources(before), wanted)
            except (InvalidValueError, ProblemError) as error:
                failure = error
        if isinstance(failure, ProblemError) and failure.status in (403, 503):
            raise failure
        self._records[worker] = structs.replace(
            record,
            not_schedulable_reasons=[] if failure is None else [f"reconciliation failed: {failure}"],
            worker_id=worker_name(worker),
            kv_events_endpoints=record.kv_events_endpoints or UNSET,
        )
        await self._changed()
        return self._judged(self._records[worker])

    async def remove(self, worker: str) -> WorkerRecord:
        """Forget a record, and stop reading the worker. Raises ProblemError (404, 503)."""
        async with self._lock:
            record = self._known(worker)
            if self._registrations is not None:
                named = record.model_name, record.routing_group, worker
                await self._registrations.replace([each for each in self._engines if each[:3] == named], {})
            del self._records[worker]
            self._kept.pop(worker, None)
            await self._changed()
        return structs.replace(record, lifecycle="unschedulable", not_schedulable_reasons=UNSET)

    async def _changed(self) -> None:
        self._num_changes += 1
        if self._registrations is not None:
            await self._registrations.save()

    def _known(self, worker: str) -> WorkerRecord:
        if worker not in self._records:
            raise ProblemError(404, ProblemKind.UNKNOWN_WORKER, f"worker {worker[:80]} not found", "worker_id", worker)
        return self._records[worker]

    def _engines_of(self, record: WorkerRecord) -> dict[StreamId, EngineSettings]:
        """Return the ranks of a record as engines, with what else is registered of them. Raises InvalidValueError."""
        from bridge import EngineSettings  # only processes that read engines load the bridge

        replay, found = record.replay_endpoint, {}
        for stream, address in _sources(record).items():
            offset = stream.dp_rank - (record.data_parallel_start_rank or 0)
            given = {
                "endpoint": address,
                "block_size": record.block_size,
                "eagle": record.is_eagle,
                "replay_endpoint": replay and endpoint_of_rank(replay, offset, "replay_endpoint"),
            }
            known: dict[str, Any] = structs.asdict(self._engines[stream]) if stream in self._engines else {}
            known |= stream._asdict() | {name: value for name, value in given.items() if value}
            found[stream] = EngineSettings(**known)
        return found

    def _judged(self, record: WorkerRecord) -> WorkerRecord:
        """Return a record with its lifecycle as of now. It is judged again when it, a rank or a view has changed."""
        namespaces, worker = self._consumer.namespaces, str(record.worker_id)
        num_views = sum(len(each.views) for each in namespaces.find(*_scope(record)))
        state = self.generation, namespaces.num_dropped, num_views
        kept = self._kept.get(worker)
        if kept is not None and kept[0] == state:
            return kept[1]
        unread = [each.dp_rank for each in _sources(record) if not self._has_events(each)]
        reasons = (
            self._lacks(record)
            or record.not_schedulable_reasons
            or [f"this service does not read the events of dp_rank {rank}" for rank in unread]
        )
        lifecycle = "incomplete" if reasons else "draining" if record.lifecycle == "draining" else "schedulable"
        judged = structs.replace(record, lifecycle=lifecycle, not_schedulable_reasons=reasons or UNSET)
        self._kept[worker] = state, judged
        return judged

    def _lacks(self, record: WorkerRecord) -> list[str]:
        """Return what must be known before the ranks of a record can be read, in Dynamo's words."""
        streams, sources = _streams_of(record), _sources(record)
        found = ["endpoint is required"] if record.endpoint is None else []
        if not record.block_size and not any(map(self._consumer.namespaces.view, streams)):
            found.append("block_size must be greater than 0")
        if not streams:
            found.append("data_parallel_size must be greater than 0")
        without = [each.dp_rank for each in streams if each not in sources and not self._has_events(each)]
        return found + [f"kv_events endpoint is required for dp_rank {rank}" for rank in without]

    def _has_events(self, stream: StreamId) -> bool:
        return stream in self._engines or self._consumer.namespaces.view(stream) is not None

    def _metrics_urls(self) -> Mapping[StreamId, str]:
        """Return the address of the metrics of each rank: as registered, or else at the endpoint of its worker."""
        if self._urls[0] == self.generation:
            return self._urls[1]
        urls = {
            stream: f"{record.endpoint.rstrip('/')}/metrics"
            for record in self._records.values()
            if record.endpoint is not None and record.endpoint.startswith("http://")
            for stream in _streams_of(record)
        }
        urls |= {stream: each.metrics_url for stream, each in self._engines.items() if each.metrics_url}
        self._urls = self.generation, urls
        return urls


def _streams_of(record: WorkerRecord) -> list[StreamId]:
    """Return the ranks of a worker."""
    named = *_scope(record), str(record.worker_id)
    return [StreamId(*named, rank) for rank in record.ranks]


def _scope(record: WorkerRecord) -> tuple[str, str]:
    """Return the model and the tenant of a worker."""
    return record.model_name, record.routing_group


def _sources(record: WorkerRecord) -> dict[StreamId, str]:
    """Return the address of the events of each rank that has one."""
    streams = _streams_of(record)
    given = dict(record.kv_events_endpoints or {})
    if record.kv_events_endpoint and len(streams) == 1:
        given.setdefault(streams[0].dp_rank, record.kv_events_endpoint)
    return {stream: given[stream.dp_rank] for stream in streams if stream.dp_rank in given}
