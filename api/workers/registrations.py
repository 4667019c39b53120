"""Engines that this process reads itself, with a bridge whose records go to the consumer's log in memory.

Registrations are saved where other services save snapshots, so that a restarted service reads the same engines.
"""

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from api.problems import ProblemError, ProblemKind
from api.settings import RegistrationSettings
from api.telemetry.families import Collected, counter, gauge, without_workers
from api.workers.allowed_addresses import AllowedAddresses
from api.workers.registration_rules import (
    check_addresses,
    check_conflicts,
    check_speaks_zmq,
    no_room,
    record_of,
    select_ranks,
    stream_of,
)
from api.workers.reports import place_of
from bridge import BridgeSettings, ConnectionState, EngineSettings, EngineStatus, Fleet, StreamStatus
from bridge.fleet import EngineConflictError
from bridge.metrics import BridgeMetrics
from bridge.republisher import RepublishError
from indexer.consumer import Consumer
from indexer.index import IndexFullError
from indexer.snapshots.base import SnapshotStore, SnapshotStoreError
from kv_events.errors import KvsightError
from kv_events.http.workers import WorkerRecord
from kv_events.log.memory import MemoryLog
from kv_events.runtime.outages import Outage
from kv_events.runtime.supervised import cancel
from kv_events.runtime.words import count
from kv_events.schema import ENGINE_UNHEARD, MEDIA, TIERS
from kv_events.streams import StreamId, split_group

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_MOST_CHECKED = 64
_LOAD_TIMEOUT_S = 2.0
_FIRST_READ_TIMEOUT_S = 10.0
_CHECK_INTERVAL_S = 0.1
_INDEX_TIMEOUT_S = 1.0
_DROP_TIMEOUT_S = 5.0
_POLL_S = 0.001
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_T = TypeVar("_T")
_NOT_INDEXED = "the index has accepted none of its batches: see kvsight_records_rejected_total"


class Registrations:
    """The registered ranks by (worker, tenant, model, rank). Belongs to the consumer's event loop."""

    def __init__(
        self,
        consumer: Consumer,
        memory_log: MemoryLog,
        settings: RegistrationSettings,
        bridge: BridgeSettings,
        store: SnapshotStore | None,
        own_port: int | None = None,
        max_files: int = sys.maxsize,
        configured: Iterable[EngineSettings] = (),
    ) -> None:
        """memory_log: the log that the consumer reads. store: where registrations are saved; None: nowhere.

        own_port: that of this service, which it must not read itself. max_files: file descriptors that engines may use.
        configured: engines that the operator has named. They need no permission, replace saved registrations of their
        names, and are not saved. Raises EngineConflictError if two of them have one name.
        """
        configured = list(configured)
        self._configured: dict[StreamId, EngineSettings] = {}
        for rank in (engine.of_rank(offset) for engine in configured for offset in range(engine.num_ranks)):
            if (held := self._configured.setdefault(stream_of(rank), rank)) is not rank:
                raise EngineConflictError(held, rank)
        self.save_failures = 0
        self._outage = Outage(logger, "registrations cannot be read or saved", "registrations are read and saved")
        self._consumer = consumer
        self._settings = settings
        self._saved = None if store is None else SavedRegistrations(store)
        self._max_files = max_files
        named = {e for each in self._configured.values() for e in (each.endpoint, each.replay_endpoint) if e}
        urls = [url for each in self._configured.values() for url in (each.metrics_url, each.url) if url]
        named |= {f"tcp://{place_of(url)}" for url in urls}
        self.allowed = AllowedAddresses(settings.register_allow, own_port, named)
        self._fleet = Fleet.embedded(bridge, memory_log, self.allowed.locate)
        self.engines: dict[StreamId, EngineSettings] = {}
        """The registered ranks."""
        self.num_changes = 0
        """Ranks registered and unregistered so far."""
        self.records = {each.worker: record_of(each) for each in reversed(configured) if each.worker and each.url}
        """Records of workers, see `WorkerRecords`. They are saved with the registrations."""
        self._added_at: dict[StreamId, float] = {}
        self._lock = asyncio.Lock()  # one change at a time, saved before the next
        self._loaded = asyncio.Event()
        self._waiting_for: set[StreamId] = set()  # loaded registrations that are not read yet
        self._unsaved = asyncio.Event()
        self._num_checked = 0  # whose addresses are being looked up

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the saved and the new registrations inside the block."""
        tasks = [asyncio.create_task(self._maintain(), name="registrations")]
        if self._settings.forget_engine_s is not None:
            tasks.append(asyncio.create_task(self._forget_gone(self._settings.forget_engine_s), name="forget-engines"))
        try:
            yield
        finally:
            await cancel(*tasks)
            await self._fleet.close()
            if self._saved is not None:
                await self._saved.close()

    def metrics(self, *, has_workers: bool) -> Collector:
        """Return the collector of the metrics of the registrations and their engines. has_workers: each has its own."""
        engines = BridgeMetrics(lambda: list(self.status().values()))

        def families() -> Iterator[Metric]:
            yield gauge("kvsight_registrations", "Registered ranks of engines", len(self.status()))
            yield counter("kvsight_registration_save_failures", "Registrations not saved", self.save_failures)
            yield from engines.collect() if has_workers else without_workers(engines.collect())

        return Collected(families)

    def status(self) -> dict[StreamId, EngineStatus]:
        """Return the status of every registered rank."""
        found = {stream_of(status.engine): status for status in self._fleet.status()}
        return {stream: self._with_failure(stream, status) for stream, status in found.items()}

    def why_not_ready(self) -> str | None:
        """Return what must still be loaded or read after a start, or None if the service is ready."""
        if not self._loaded.is_set():
            return str(self._outage) or "the saved registrations are not loaded yet"
        num = len(self._waiting_for)
        return count(num, "registered engine still to be read", "registered engines still to be read") if num else None

    async def add(self, engine: EngineSettings, *, is_peer: bool) -> bool:
        """Start to read one rank and wait until queries know it. Returns False if it was registered already.

        is_peer: also refuse what Dynamo refuses. Raises ProblemError.
        """
        if self._num_checked >= _MOST_CHECKED:
            detail = f"the addresses of {_MOST_CHECKED} other engines are being looked up"
            raise ProblemError(503, ProblemKind.OVERLOADED, detail, retry_after_s=1)
        self._num_checked += 1
        try:
            await check_addresses(engine, self.allowed)
            if self.engines.get(stream_of(engine)) != engine:
                await check_speaks_zmq(engine, self.allowed)
        finally:
            self._num_checked -= 1
        await self._wait_until_loaded()
        async with self._lock:
            if self.engines.get(stream_of(engine)) == engine:
                return False
            await self._add([engine], is_peer=is_peer)
            await self._save()
        await self._wait_until_indexed([engine])
        return True

    async def remove(self, worker: str, model: str, tenant: str | None, dp_rank: int | None) -> list[EngineSettings]:
        """Stop reading a worker, all ranks or one, and drop its pages. Returns what was removed. tenant: None is any.

        Raises ProblemError (404, 503).
        """
        await self._wait_until_loaded()
        async with self._lock:
            selected = select_ranks(self.engines, worker, model, tenant, dp_rank)
            await self._remove(selected)
        return list(selected.values())

    async def replace(self, before: Iterable[StreamId], wanted: Mapping[StreamId, EngineSettings]) -> None:
        """Read ranks with checked addresses instead of those before. Ranks that stay as they are keep their pages.

        The caller saves. Raises ProblemError (409, 503), and then reads no new rank."""
        await self._wait_until_loaded()
        async with self._lock:
            streams = {*before, *wanted} & self.engines.keys()
            if leaving := [stream for stream in streams if self.engines[stream] != wanted.get(stream)]:
                await self._remove(leaving)
            new = [engine for stream, engine in wanted.items() if stream not in self.engines]
            await self._add(new, is_peer=True)
        await self._wait_until_indexed(new)

    async def save(self) -> None:
        """Save registrations and records. If the store is unavailable, it is tried again later."""
        await self._wait_until_loaded()
        async with self._lock:
            await self._save()

    def room(self, stream: StreamId) -> dict[str, int]:
        """Return for how many pages a rank has room, by medium, as far as its registration says it."""
        capacity = self.engines[stream].capacity if stream in self.engines else {}
        return {medium.value: capacity[tier] for medium, tier in zip(MEDIA, TIERS, strict=True) if tier in capacity}

    async def _remove(self, streams: Collection[StreamId]) -> None:
        for stream in streams:
            await self._fleet.remove(stream.worker, model=stream.model, tenant=stream.tenant, dp_rank=stream.dp_rank)
            del self.engines[stream], self._added_at[stream]
            self.num_changes += 1
        await self._save()
        await self._forget(self._unread({stream._replace(dp_rank=0) for stream in streams}))

    def _check_room(self, new: Sequence[EngineSettings]) -> None:
        engine, engines = new[0], [*self.engines.values(), *new]
        if len(engines) > self._settings.max_registrations:
            raise no_room(f"{len(self.engines)} ranks are registered already (--max-registrations)", engine)
        if (num_files := sum(each.num_files for each in engines)) > self._max_files:
            limit = f"engines may use {self._max_files} file descriptors, and {num_files} would be needed"
            raise no_room(f"{limit}: raise the limit on open files (LimitNOFILE=, ulimit -n)", engine, 503)
        sizes = {stream_of(each): each.block_size for each in engines if each.block_size is not None}
        try:
            self._consumer.namespaces.check_room(sizes)
        except IndexFullError as error:
            raise no_room(str(error), engine) from None

    # --- the log ----------------------------------------------------------------------------------------------------

    async def _add(self, new: Sequence[EngineSettings], *, is_peer: bool) -> None:
        for engine in new:
            check_conflicts(self.engines, engine, is_peer=is_peer)
        if new:
            self._check_room(new)
        for engine in new:
            await self._fleet.add(engine)
            self.engines[stream_of(engine)] = engine
            self._added_at[stream_of(engine)] = time.monotonic()
            self.num_changes += 1
            await asyncio.sleep(0)  # to start a reader takes milliseconds

    async def _wait_until_indexed(self, engines: Iterable[EngineSettings]) -> None:
        """Wait until the first record of each rank, which was sent already, has been applied."""
        deadline = time.monotonic() + _INDEX_TIMEOUT_S
        for stream in [stream_of(each) for each in engines if each.block_size]:  # others send it with the first store
            while stream in self.engines and self._consumer.namespaces.view(stream) is None:
                if time.monotonic() > deadline:
                    logger.warning("%s was registered, but %s", stream.key, _NOT_INDEXED)
                    return
                await asyncio.sleep(_POLL_S)

    def _with_failure(self, stream: StreamId, status: EngineStatus) -> EngineStatus:
        is_new = time.monotonic() <= self._added_at.get(stream, 0.0) + _INDEX_TIMEOUT_S
        has_sent = any(each.publisher is not None for each in status.streams if each.stream == stream)
        if status.failure or is_new or not has_sent or self._consumer.namespaces.view(stream) is not None:
            return status
        return status._replace(failure=_NOT_INDEXED)

    def _is_read(self, stream: StreamId, status: EngineStatus) -> bool:
        """Return whether everything that the engine still keeps from before the start is in the index."""
        if status.counters.failed_replays:
            return True
        view = self._consumer.namespaces.view(stream)
        is_receiving = status.engine.replay_endpoint is None or (
            view is not None and view.degraded_reason != ENGINE_UNHEARD
        )
        return (
            is_receiving
            and status.state not in (ConnectionState.CONNECTING, ConnectionState.UNREACHABLE)
            and all(map(self._is_applied, status.streams))
        )

    def _is_applied(self, status: StreamStatus) -> bool:
        view = self._consumer.namespaces.view(status.stream)
        return view is not None and sum(view.num_pages) >= status.pages_held

    def _unread(self, workers: Collection[StreamId]) -> list[StreamId]:
        """Return the known streams of these workers that are no longer read. Batches may have named further ranks."""
        read = {stream.stream for status in self._fleet.status() for stream in status.streams} | self.engines.keys()
        known = [view.stream for view in self._consumer.namespaces.views]
        return [s for s in known if s not in read and s._replace(model=split_group(s.model)[0], dp_rank=0) in workers]

    async def _forget(self, streams: Collection[StreamId]) -> None:
        try:
            await asyncio.wait_for(self._consumer.forget(streams), _DROP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("unregistered pages are still to be dropped: the index is behind")

    # --- saved registrations ----------------------------------------------------------------------------------------

    async def _wait_until_loaded(self) -> None:
        """Wait until the saved registrations are loaded, because they may conflict. Raises ProblemError (503)."""
        try:
            await asyncio.wait_for(self._loaded.wait(), _LOAD_TIMEOUT_S)
        except TimeoutError:
            detail = "the saved registrations cannot be read at the moment"
            raise ProblemError(503, ProblemKind.REGISTRATIONS_AWAY, detail, retry_after_s=1) from None

    async def _maintain(self) -> None:
        while True:
            try:
                if not self._loaded.is_set():
                    await self._load()
                    await self._await_first_reads()
                await self._unsaved.wait()
                await asyncio.sleep(_RETRY_S)
                async with self._lock:
                    if self._unsaved.is_set():
                        await self._save()
            except Exception as error:
                if self._outage.since is None and not isinstance(error, SnapshotStoreError | RepublishError):
                    logger.exception("registrations: an unexpected error; trying again")
                self._outage.note_failure(error)
            await asyncio.sleep(_RETRY_S)

    async def _forget_gone(self, after_s: float) -> None:
        """Unregister ranks that have no connection for `after_s`, unless the operator has named them."""
        await self._loaded.wait()
        while True:
            await asyncio.sleep(min(_RETRY_S, after_s))
            for stream in self._gone(after_s):
                async with self._lock:
                    if stream in self._gone(after_s):  # it may be back, or gone for good
                        logger.warning("%s is unregistered: no connection for %.0f s", stream.key, after_s)
                        await self._remove([stream])

    def _gone(self, after_s: float) -> list[StreamId]:
        found = self.status().items()
        down = [stream for stream, status in found if status.down_s is not None and status.down_s >= after_s]
        return [stream for stream in down if stream not in self._configured]

    async def _load(self) -> None:
        async with self._lock:
            for stream, engine in self._configured.items():
                if stream not in self.engines:  # from an attempt before
                    await self._restore(engine, None)
        engines, records = ([], []) if self._saved is None else await self._saved.load()
        checks = (check_addresses(engine, self.allowed) for engine in engines)
        refusals = await asyncio.gather(*checks, return_exceptions=True)
        async with self._lock:
            for engine, refusal in zip(engines, refusals, strict=True):
                if stream_of(engine) not in self._configured:
                    await self._restore(engine, refusal)
            for record in records:
                self.records.setdefault(str(record.worker_id), record)
            self.num_changes += 1
            self._waiting_for = {stream for stream, engine in self.engines.items() if engine.worker is not None}
            self._outage.note_success()
            self._loaded.set()

    async def _await_first_reads(self) -> None:
        deadline = time.monotonic() + _FIRST_READ_TIMEOUT_S
        try:
            while self._waiting_for and time.monotonic() < deadline:
                status = self.status()
                self._waiting_for &= {stream for stream in status if not self._is_read(stream, status[stream])}
                await asyncio.sleep(_CHECK_INTERVAL_S)
            for stream in sorted(self._waiting_for):
                logger.warning(
                    "%s is registered, but could not be read within %.0f s", stream.key, _FIRST_READ_TIMEOUT_S
                )
        finally:
            self._waiting_for.clear()

    async def _restore(self, engine: EngineSettings, refusal: BaseException | None) -> None:
        try:
            if refusal is not None:
                raise refusal
            await self._add([engine], is_peer=False)
        except RepublishError:  # an address to republish on is in use: it may become free
            raise
        except KvsightError as error:
            logger.warning("registration of %s is dropped: %s", stream_of(engine).key, error)

    async def _save(self) -> None:
        """Save, with retries while the store is unavailable."""
        if self._saved is None:
            return
        self._unsaved.set()
        try:
            engines = [each for stream, each in self.engines.items() if self._configured.get(stream) != each]
            named = {stream.worker for stream in self._configured}
            await self._saved.save(engines, [each for name, each in self.records.items() if name not in named])
        except SnapshotStoreError as error:
            self.save_failures += 1
            self._outage.note_failure(error)
        else:
            self._outage.note_success()
            self._unsaved.clear()


class OtherWriterError(SnapshotStoreError):
    """Another process has saved its own registrations since this one read them."""


class _SavedList(msgspec.Struct):
    engines: list[msgspec.Raw]
    records: list[msgspec.Raw] = []
    writer: str = ""
    """Process that saved the list. "" if there is none, or if it cannot be decoded."""


class SavedRegistrations:
    """The saved list. Belongs to one event loop."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._own_name = uuid.uuid4().hex
        self._writer_before = ""  # the process whose list this one took over

    async def load(self) -> tuple[list[EngineSettings], list[WorkerRecord]]:
        """Return the saved registrations and records. Raises SnapshotStoreError."""
        saved = _decoded(await self._store.load())
        self._writer_before = saved.writer
        return _readable(saved.engines, EngineSettings), _readable(saved.records, WorkerRecord)

    async def save(self, engines: Iterable[EngineSettings], records: Iterable[WorkerRecord] = ()) -> None:
        """Replace the list. Raises SnapshotStoreError; if it is OtherWriterError, nothing was overwritten."""
        writer = _decoded(await self._store.load()).writer
        if writer not in ("", self._own_name, self._writer_before):
            raise OtherWriterError(
                "another service saves its registrations in the same place: each needs a folder (--snapshot-dir) or "
                "a Redis database (KVSIGHT_REDIS, redis://HOST:PORT/DB) of its own"
            )
        image = {"engines": list(engines), "records": list(records), "writer": self._own_name}
        await self._store.save([msgspec.json.encode(image)])

    async def close(self) -> None:
        """Close connections."""
        await self._store.close()


def _decoded(data: bytes | None) -> _SavedList:
    try:
        return msgspec.json.decode(data, type=_SavedList) if data else _SavedList([])
    except _UNREADABLE as error:
        logger.warning("the saved registrations cannot be decoded: %s", error)
        return _SavedList([])


def _readable(entries: Iterable[msgspec.Raw], kind: type[_T]) -> list[_T]:
    found = []
    for entry in entries:
        try:
            found.append(msgspec.json.decode(entry, type=kind))
        except _UNREADABLE as error:
            logger.warning("a saved registration cannot be decoded: %s", error)
    return found
