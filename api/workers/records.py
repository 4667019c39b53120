"""The records of workers: where they take requests, and whether they may get new ones.

A worker that only its events name has no record. It may get requests, and its address is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType, structs

from api.problems import ProblemError, ProblemKind
from api.settings import RegistrationSettings
from api.workers.allowed_addresses import AllowedAddresses
from api.workers.engine_metrics import place_of
from api.workers.registration_rules import check_address, check_addresses, stream_of
from api.workers.reports import Pages, Reports
from api.workers.saved_list import SavedList
from indexer.consumer import Consumer
from indexer.snapshots.base import SnapshotStore, SnapshotStoreError
from kv_events.engine_wire import endpoint_of_rank
from kv_events.errors import InvalidValueError
from kv_events.http.worker_records import WorkerRecord, worker_number
from kv_events.runtime.supervised import keep_running
from kv_events.schema import MEDIA
from kv_events.streams import StreamId, split_group

if TYPE_CHECKING:
    from api.workers.registrations import Registrations
    from bridge import EngineSettings

logger = logging.getLogger(__name__)


class WorkerRecords:
    """The records by worker. Belongs to the consumer's event loop."""

    def __init__(
        self,
        consumer: Consumer,
        registrations: Registrations | None = None,
        settings: RegistrationSettings | None = None,
        store: SnapshotStore | None = None,
        own_port: int | None = None,
    ) -> None:
        """registrations: engines that this process reads itself. None: it reads a log. Those that the operator has named
        with a `url` have records. store: where the others are saved; None: nowhere. own_port: that of this service.
        """
        settings = settings or RegistrationSettings()
        self._consumer = consumer
        self._registrations = registrations
        self._engines = {} if registrations is None else registrations.engines
        self._most = settings.max_registrations
        self._configured = {} if registrations is None else _configured(registrations.configured)
        self._records = dict(self._configured)
        self._failures: dict[str, str] = {}  # by worker: why its engines are not read
        self._lock = asyncio.Lock()  # one change at a time, saved before the next
        self._num_changes = 0
        self._saved = None if store is None else SavedList(store, WorkerRecord)
        self._is_loaded = False
        self._unsaved = asyncio.Event()
        own = AllowedAddresses(settings.register_allow, own_port) if registrations is None else registrations.allowed
        self._allowed = own
        self.reports = Reports(self._metrics_urls, self._room, own)
        """What the engines say of themselves."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load and save records, and read the engines' metrics, inside the block."""
        parts = {"engine-metrics": self.reports.follow, "worker-records": self._keep_saved}
        tasks = [asyncio.create_task(keep_running(run, name, logger), name=name) for name, run in parts.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._saved is not None:
                await self._saved.close()

    @property
    def generation(self) -> int:
        """A number that grows with every change of a record, of the registered ranks and of the known views."""
        namespaces, registrations = self._consumer.namespaces, self._registrations
        num_changes = self._num_changes + (0 if registrations is None else registrations.num_changes)
        return num_changes + namespaces.num_views + 2 * namespaces.num_dropped

    def get(self, worker: str, model: str, tenant: str) -> WorkerRecord | None:
        """Return the record of a worker as of now. None: it has none for this model and tenant."""
        record = self._records.get(worker)
        if record is None or (record.model_name, record.routing_group) != (model, tenant):
            return None
        return self._judged(record)

    def is_schedulable(self, worker: str, model: str, tenant: str) -> bool:
        """Return whether a worker that has a view or a record may get new requests."""
        record = self.get(worker, model, tenant)
        return record is None or record.lifecycle == "schedulable"

    def all(self) -> list[WorkerRecord]:
        """Return all records as of now."""
        return [self._judged(record) for record in self._records.values()]

    def num_schedulable(self) -> int:
        """Return the number of workers that may get new requests."""
        streams = (view.stream for view in self._consumer.namespaces.views)
        known = {(each.worker, each.model, each.tenant) for each in streams if split_group(each.model)[1] is None}
        known |= {(name, each.model_name, each.routing_group) for name, each in self._records.items()}
        return sum(self.is_schedulable(*each) for each in known)

    async def put(self, record: WorkerRecord) -> WorkerRecord:
        """Add or replace a record, and read the ranks whose addresses it names. Raises ProblemError (403, 409, 503).

        A record with other faults is kept, and its `not_schedulable_reasons` name them.
        """
        worker = str(record.worker_id)
        if record.endpoint is not None:
            await check_address("endpoint", f"tcp://{place_of(record.endpoint)}", worker, self._allowed)
        async with self._lock:
            if worker not in self._records and len(self._records) >= self._most:
                detail = f"{self._most} workers have records already (--max-registrations)"
                raise ProblemError(409, ProblemKind.TOO_MANY_REGISTRATIONS, detail, "worker_id", record.worker_id)
            record = structs.replace(record, worker_id=worker_number(worker), not_schedulable_reasons=UNSET)
            self._failures[worker] = await self._read(record)
            self._records[worker] = record
            await self._changed()
        return self._judged(record)

    def patched(self, worker: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a record with other fields, not yet checked. None leaves a field. Raises ProblemError (404)."""
        own = structs.asdict(self._known(worker))
        identity = {name: own[name] for name in ("worker_id", "model_name", "routing_group")}
        merged = own | {name: value for name, value in given.items() if value is not None} | identity
        return {name: value for name, value in merged.items() if value is not UNSET}

    async def remove(self, worker: str) -> WorkerRecord:
        """Forget a record, and stop reading the worker. Raises ProblemError (404, 503)."""
        async with self._lock:
            record = self._known(worker)
            if self._registrations is not None:
                try:
                    await self._registrations.remove(worker, record.model_name, record.routing_group, None)
                except ProblemError as problem:
                    if problem.kind is not ProblemKind.UNKNOWN_WORKER:  # none of its ranks is registered
                        raise
            del self._records[worker]
            self._failures.pop(worker, None)
            await self._changed()
        return structs.replace(record, lifecycle="unschedulable")

    def _known(self, worker: str) -> WorkerRecord:
        if worker not in self._records:
            raise ProblemError(404, ProblemKind.UNKNOWN_WORKER, f"worker {worker[:80]} not found", "worker_id", worker)
        return self._records[worker]

    async def _read(self, record: WorkerRecord) -> str:
        """Read the ranks of a record, and no longer those of the record before. Returns why not, or ""."""
        registrations, held = self._registrations, self._engines
        if registrations is None:
            return ""
        try:
            wanted = {} if self._lacks(record) else {stream_of(each): each for each in _engines_of(record)}
            for engine in wanted.values():
                await check_addresses(engine, self._allowed)
            before = self._records.get(str(record.worker_id))
            for stream, address in {} if before is None else _sources(before).items():
                is_own = stream in held and held[stream].endpoint == address
                if is_own and not _is_same(held[stream], wanted.get(stream)):
                    await registrations.remove(stream.worker, stream.model, stream.tenant, stream.dp_rank)
            for stream, engine in wanted.items():
                if not _is_same(held.get(stream), engine):
                    await registrations.add(engine, is_peer=True)
        except (InvalidValueError, ProblemError) as error:
            if isinstance(error, ProblemError) and error.status in (403, 503):
                raise
            return f"reconciliation failed: {error}"
        return ""

    def _judged(self, record: WorkerRecord) -> WorkerRecord:
        reasons = self._lacks(record)
        if not reasons and (failure := self._failures.get(str(record.worker_id))):
            reasons = [failure]
        if not reasons:
            without = [each.dp_rank for each in _sources(record) if not self._has_events(each)]
            reasons = [f"this service does not read the events of dp_rank {rank}" for rank in without]
        lifecycle = "incomplete" if reasons else "draining" if record.lifecycle == "draining" else "schedulable"
        return structs.replace(record, lifecycle=lifecycle, not_schedulable_reasons=reasons or UNSET)

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
        urls = {
            stream: f"{record.endpoint.rstrip('/')}/metrics"
            for record in self._records.values()
            if record.endpoint is not None and record.endpoint.startswith("http://")
            for stream in _streams_of(record)
        }
        return urls | {stream: each.metrics_url for stream, each in self._engines.items() if each.metrics_url}

    def _room(self, stream: StreamId) -> Pages:
        """Return the room of a rank as its registration says it, or else its record."""
        record = self._records.get(stream.worker)
        pages = record.total_kv_blocks if record is not None and stream in _streams_of(record) else None
        found = {MEDIA[0].value: pages} if pages else {}
        return found if self._registrations is None else found | self._registrations.room(stream)

    async def _keep_saved(self) -> None:
        """Load what is saved, and save what could not be saved at once. Raises SnapshotStoreError."""
        if self._saved is not None and not self._is_loaded:
            for record in await self._saved.load():
                self._records.setdefault(str(record.worker_id), record)
            self._is_loaded = True
            self._num_changes += 1
        while True:
            await self._unsaved.wait()
            async with self._lock:
                await self._save()

    async def _changed(self) -> None:
        self._num_changes += 1
        self._unsaved.set()
        with suppress(SnapshotStoreError):  # `_keep_saved` tries again, and logs the error
            await self._save()

    async def _save(self) -> None:
        if self._saved is not None and self._is_loaded:
            await self._saved.save(
                [each for name, each in self._records.items() if self._configured.get(name) != each]
            )
        self._unsaved.clear()


def _configured(engines: Mapping[StreamId, EngineSettings]) -> dict[str, WorkerRecord]:
    """Return the records of engines with a `url`, by worker. engines: by rank, each worker's first rank first."""
    return {
        stream.worker: WorkerRecord(
            worker_id=worker_number(stream.worker),
            model_name=stream.model,
            routing_group=stream.tenant,
            endpoint=engine.url,
            block_size=engine.block_size,
            data_parallel_start_rank=min(each.dp_rank for each in engines if each[:3] == stream[:3]),
            data_parallel_size=sum(each[:3] == stream[:3] for each in engines),
        )
        for stream, engine in engines.items()
        if engine.url is not None
    }


def _streams_of(record: WorkerRecord) -> list[StreamId]:
    """Return the ranks of a worker."""
    first = record.data_parallel_start_rank or 0
    size = 1 if record.data_parallel_size is None else record.data_parallel_size
    named = record.model_name, record.routing_group, str(record.worker_id)
    return [StreamId(*named, rank) for rank in range(first, first + size)]


def _sources(record: WorkerRecord) -> dict[StreamId, str]:
    """Return the address of the events of each rank that has one."""
    streams = _streams_of(record)
    given = {} if isinstance(record.kv_events_endpoints, UnsetType) else dict(record.kv_events_endpoints)
    if record.kv_events_endpoint and len(streams) == 1:
        given.setdefault(streams[0].dp_rank, record.kv_events_endpoint)
    return {stream: given[stream.dp_rank] for stream in streams if stream.dp_rank in given}


def _engines_of(record: WorkerRecord) -> list[EngineSettings]:
    """Return the ranks of a record as engines. Raises InvalidValueError."""
    from bridge import EngineSettings  # only processes that read engines load the bridge

    replay, first = record.replay_endpoint, record.data_parallel_start_rank or 0
    return [
        EngineSettings(
            endpoint=address,
            worker=stream.worker,
            model=stream.model,
            tenant=stream.tenant,
            dp_rank=stream.dp_rank,
            block_size=record.block_size or None,
            eagle=bool(record.is_eagle),
            replay_endpoint=endpoint_of_rank(replay, stream.dp_rank - first, "replay_endpoint") if replay else None,
        )
        for stream, address in _sources(record).items()
    ]


def _is_same(held: EngineSettings | None, wanted: EngineSettings | None) -> bool:
    """Return whether a registered rank is the one that a record names."""
    if held is None or wanted is None or held.endpoint != wanted.endpoint or wanted.eagle > held.eagle:
        return False
    is_replayed = wanted.replay_endpoint in (None, held.replay_endpoint)
    return is_replayed and (held.block_size is None or wanted.block_size in (None, held.block_size))
