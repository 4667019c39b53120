"""Engines that this process reads itself: the bridge inside, its records on the consumer's log in memory.

What is registered is kept beside the snapshots, so that a service that was restarted reads on.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.problems import ProblemError
from api.settings import RegistrationSettings
from indexer.consumer import Consumer
from indexer.snapshots.base import SnapshotStore, SnapshotStoreError
from kv_events.errors import InvalidValueError
from kv_events.memory_log import MemoryLog
from kv_events.streams import StreamId
from publisher.bridge import BridgeSettings, EngineSettings, EngineStatus, Fleet
from publisher.bridge.frames import is_ours_to_bind
from publisher.bridge.metrics import BridgeMetrics
from publisher.settings import PublisherSettings
from publisher.sinks.memory import MemorySink

log = logging.getLogger(__name__)

_TCP = re.compile(r"tcp://(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]):[0-9]{1,5}")
_IPC = re.compile(r"ipc://[A-Za-z0-9_./@-]{1,100}")
_RETRY_S = 1.0
_SEEN_S = 1.0
_FORGOTTEN_S = 5.0
_POLL_S = 0.005


class _Saved(msgspec.Struct):
    engines: list[msgspec.Raw]


class Registrations:
    """The registered ranks, by (worker, tenant, model, rank). Belongs to the consumer's event loop."""

    def __init__(
        self,
        consumer: Consumer,
        memory_log: MemoryLog,
        settings: RegistrationSettings,
        bridge: BridgeSettings,
        store: SnapshotStore | None,
    ) -> None:
        """memory_log: what the consumer reads. store: where registrations are kept; None: nowhere."""
        self.save_failures = 0
        self._consumer = consumer
        self._settings = settings
        self._store = store
        # every stream has a name and a block size of its own
        template = PublisherSettings(model="bridge", worker="bridge", dp_rank=0, block_size=1)
        self._fleet = Fleet(bridge, template, MemorySink(memory_log))
        self._engines: dict[StreamId, EngineSettings] = {}
        self._lock = asyncio.Lock()  # one change at a time, and saved before the next
        self._is_loaded = store is None
        self._unsaved = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read what was registered before, and what will be, inside a block."""
        keeping = asyncio.create_task(self._keep(), name="registrations")
        keeping.add_done_callback(_log_death)
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self._fleet.close()
            if self._store is not None:
                await self._store.close()

    def metrics(self) -> Collector:
        """Figures of the registrations and of the engines."""
        return _Metrics(self)

    def status(self) -> dict[StreamId, EngineStatus]:
        """Every registered rank."""
        return {_stream(status.engine): status for status in self._fleet.status()}

    async def add(self, engine: EngineSettings, *, is_peer: bool) -> bool:
        """Begin to read one rank, and wait until queries know of it. False: it was read already, just so.

        is_peer: also refuse what the running peer refuses. Raises ProblemError.
        """
        self._check_addresses(engine)
        async with self._lock:
            if self._engines.get(_stream(engine)) == engine:
                return False
            self._check_conflicts(engine, is_peer=is_peer)
            if len(self._engines) >= self._settings.max_registrations:
                detail = f"{len(self._engines)} ranks are registered already (KVSIGHT_MAX_REGISTRATIONS)"
                raise ProblemError(409, "too-many-registrations", detail)
            await self._add(engine)
            await self._save()
        await self._seen(_stream(engine))
        return True

    async def remove(self, worker: str, model: str, tenant: str | None, dp_rank: int | None) -> list[EngineSettings]:
        """Stop reading a worker, all ranks or one, and drop its pages; what was removed. tenant: None: whatever it is.

        Raises ProblemError (404).
        """
        async with self._lock:
            meant = self._meant(worker, model, tenant, dp_rank)
            status = self.status()
            streams = {each.stream for stream in meant for each in status[stream].streams} | meant.keys()
            for stream in meant:
                await self._fleet.remove(
                    stream.worker, model=stream.model, tenant=stream.tenant, dp_rank=stream.dp_rank
                )
                del self._engines[stream]
            await self._save()
            await self._forget(streams - self._engines.keys())
        return list(meant.values())

    # --- what may be registered -------------------------------------------------------------------------------------

    def _check_addresses(self, engine: EngineSettings) -> None:
        for field in ("endpoint", "replay_endpoint"):
            address: str | None = getattr(engine, field)
            if address is None:
                continue
            if not (_TCP.fullmatch(address) or _IPC.fullmatch(address)) or is_ours_to_bind(address):
                expected = "the engine's own address, tcp://HOST:PORT; this service binds none"
                raise ProblemError.of_value(InvalidValueError(field, address, expected), 400, "invalid-endpoint")
            if ".." in address or not self._settings.allows(address):
                expected = f"an address that fits {self._settings.register_allow!r} (KVSIGHT_REGISTER_ALLOW)"
                raise ProblemError.of_value(InvalidValueError(field, address, expected), 403, "endpoint-not-allowed")

    def _check_conflicts(self, engine: EngineSettings, *, is_peer: bool) -> None:
        wanted = _stream(engine)
        if wanted in self._engines:
            raise _conflict(f"instance {engine.worker} dp_rank {engine.dp_rank} already registered", engine)
        for held, settings in self._engines.items():
            home = f"model={held.model} routing_group={held.tenant}"
            is_same_worker = held.worker == wanted.worker and (is_peer or held.tenant == wanted.tenant)
            if is_same_worker and (held.model, held.tenant) != (wanted.model, wanted.tenant):
                raise _conflict(f"instance {engine.worker} is already registered for {home}", engine)
            is_same_home = (held.model, held.tenant) == (wanted.model, wanted.tenant)
            if is_peer and is_same_home and settings.block_size != engine.block_size:
                sizes = f"existing={settings.block_size}, requested={engine.block_size}"
                raise _conflict(f"block_size mismatch for {home}: {sizes}", engine)

    def _meant(
        self, worker: str, model: str, tenant: str | None, dp_rank: int | None
    ) -> dict[StreamId, EngineSettings]:
        """The ranks that a caller wants to be rid of; at least one."""
        of_worker = {s: e for s, e in self._engines.items() if s.worker == worker and tenant in (None, s.tenant)}
        if not of_worker:
            raise _unknown(f"instance {worker} not found", worker)
        of_model = {stream: engine for stream, engine in of_worker.items() if stream.model == model}
        if not of_model:
            other = next(iter(of_worker))
            raise _unknown(
                f"instance {worker} is registered for model={other.model} routing_group={other.tenant}", worker
            )
        meant = {stream: engine for stream, engine in of_model.items() if dp_rank in (None, stream.dp_rank)}
        if not meant:
            raise _unknown(f"instance {worker} dp_rank {dp_rank} not found", worker)
        return meant

    # --- from and to the log ----------------------------------------------------------------------------------------

    async def _add(self, engine: EngineSettings) -> None:
        await self._fleet.add(engine)
        self._engines[_stream(engine)] = engine

    async def _seen(self, stream: StreamId) -> None:
        """The first record, which names the stream, is on its way already."""
        give_up = time.monotonic() + _SEEN_S
        while self._consumer.namespaces.view(stream) is None and time.monotonic() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def _forget(self, streams: Iterable[StreamId]) -> None:
        try:
            await asyncio.wait_for(self._consumer.forget(list(streams)), _FORGOTTEN_S)
        except TimeoutError:
            log.warning("unregistered pages are still to be dropped: the index is behind")

    # --- kept beyond this process -----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while not self._is_loaded:
            await self._load()
        while True:
            await self._unsaved.wait()
            await asyncio.sleep(_RETRY_S)
            async with self._lock:
                await self._save()

    async def _load(self) -> None:
        assert self._store is not None
        try:
            data = await self._store.load()
        except SnapshotStoreError as error:
            log.warning("registrations cannot be read yet: %s", error)
            await asyncio.sleep(_RETRY_S)
            return
        async with self._lock:
            for engine in engines_of(data):
                await self._restore(engine)
            self._is_loaded = True
            if self._unsaved.is_set():
                await self._save()

    async def _restore(self, engine: EngineSettings) -> None:
        if _stream(engine) in self._engines:
            return  # registered anew meanwhile
        try:
            self._check_addresses(engine)
        except ProblemError as error:
            log.warning("registration of %s is given up: %s", _stream(engine).key, error)
        else:
            await self._add(engine)

    async def _save(self) -> None:
        """Where the store is away: later, and again."""
        if self._store is None:
            return
        self._unsaved.set()
        if not self._is_loaded:
            return  # what is kept there must not be lost
        try:
            await self._store.save(msgspec.json.encode({"engines": list(self._engines.values())}))
        except SnapshotStoreError as error:
            self.save_failures += 1
            log.warning("registrations are not saved: %s", error)
        else:
            self._unsaved.clear()


class _Metrics(Collector):
    def __init__(self, registrations: Registrations) -> None:
        self._registrations = registrations
        self._engines = BridgeMetrics(lambda: list(registrations.status().values()))

    def collect(self) -> Iterator[Metric]:
        registered = len(self._registrations.status())
        yield GaugeMetricFamily("kvsight_registrations", "Registered ranks of engines", value=registered)
        failures = self._registrations.save_failures
        yield CounterMetricFamily("kvsight_registration_save_failures", "Registrations not saved", value=failures)
        yield from self._engines.collect()


def engines_of(data: bytes | None) -> list[EngineSettings]:
    """What was saved; entries that do not read back are left out, which is said in the log."""
    engines = []
    try:
        entries = msgspec.json.decode(data, type=_Saved).engines if data else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("registrations do not read back: %s", error)
        return []
    for entry in entries:
        try:
            engines.append(msgspec.json.decode(entry, type=EngineSettings))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("a registration does not read back: %s", error)
    return engines


def _stream(engine: EngineSettings) -> StreamId:
    """Identity of a rank; registered engines have names."""
    return StreamId(engine.model or "", engine.tenant, engine.worker or "", engine.dp_rank)


def _conflict(detail: str, engine: EngineSettings) -> ProblemError:
    return ProblemError(409, "already-registered", detail, "instance_id", engine.worker)


def _unknown(detail: str, worker: str) -> ProblemError:
    return ProblemError(404, "unknown-worker", detail, "instance_id", worker)


def _log_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s died", task.get_name(), exc_info=task.exception())
