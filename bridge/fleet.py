"""All engines that a process reads, published to one sink."""

import asyncio
from typing import Self

import zmq.asyncio

from bridge.engine import EngineConnection, EngineStatus
from bridge.registry import StreamRegistry
from bridge.republisher import started_republishers
from bridge.settings import BridgeSettings, EngineSettings
from bridge.shared_sink import SharedSink
from kv_events.engine_wire import Locate, as_given
from kv_events.errors import InvalidValueError, KvsightError
from kv_events.log.memory import MemoryLog
from publisher.settings import PublisherSettings
from publisher.sinks.base import Sink
from publisher.sinks.memory import MemorySink

_MAX_SOCKETS = 65_535
"""The most that ZMQ supports. By default it has 1023, but an engine needs three, and three more during a replay."""

_REMOVAL_S = 5.0
"""For what a removed engine has still queued."""

_Key = tuple[str | None, str, str, int]


class EngineConflictError(KvsightError):
    """A rank of the worker is registered already, with other settings."""

    def __init__(self, held: EngineSettings, wanted: EngineSettings) -> None:
        super().__init__(f"worker {held.worker} rank {held.dp_rank} is registered already, at {held.endpoint}")
        self.held = held
        self.wanted = wanted


class Fleet:
    """Reads engines and publishes their events. All methods must be called on one event loop.

    `async with Fleet(...) as fleet: await fleet.add(engine)`. Adding and removing are idempotent.
    """

    def __init__(
        self, settings: BridgeSettings, template: PublisherSettings, sink: Sink, locate: Locate = as_given
    ) -> None:
        """template: settings of every worker's publisher. Its names and block size are not used. locate: called before
        each connection to an engine, and every few seconds without one.
        """
        if template.with_tokens:
            raise InvalidValueError("KVSIGHT_WITH_TOKENS", True, "false: a bridge does not forward tokens")
        self._sink = SharedSink(sink)
        self._registry = StreamRegistry(settings, template, self._sink, locate)
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._readers: dict[_Key, EngineConnection] = {}
        self._adding = asyncio.Lock()
        self._stopping: dict[_Key, asyncio.Task[None]] = {}  # removed, but still closing their streams

    @classmethod
    def embedded(cls, settings: BridgeSettings, memory_log: MemoryLog, locate: Locate = as_given) -> Self:
        """A fleet that publishes to a log in memory, which an indexer of the same process reads."""
        # every stream gets its own names and block size
        template = PublisherSettings(model="bridge", worker="bridge", dp_rank=0, block_size=1)
        return cls(settings, template, MemorySink(memory_log), locate)

    async def add(self, engine: EngineSettings) -> bool:
        """Begin to read all ranks of an engine. Waits for ranks that are still being removed.

        Returns False if all of them are read already. Raises EngineConflictError, without any change, if one of them is
        read with other settings. Raises RepublishError if the events of one cannot be sent on.
        """
        async with self._adding:
            return await self._add([engine.of_rank(offset) for offset in range(engine.num_ranks)])

    async def _add(self, ranks: list[EngineSettings]) -> bool:
        while leaving := [self._stopping[_key(rank)] for rank in ranks if _key(rank) in self._stopping]:
            await asyncio.wait(leaving)
        for rank in ranks:
            reader = self._readers.get(_key(rank))
            if reader is not None and reader.engine != rank:
                raise EngineConflictError(reader.engine, rank)
        new = [rank for rank in ranks if _key(rank) not in self._readers]
        republishers = await started_republishers(new)
        for rank, republisher in zip(new, republishers, strict=True):
            reader = EngineConnection(self._context, rank, self._registry, republisher)
            self._readers[_key(rank)] = reader
            reader.start()
        return bool(new)

    async def remove(
        self, worker: str, *, model: str | None = None, tenant: str | None = None, dp_rank: int | None = None
    ) -> list[EngineSettings]:
        """Stop reading a worker and publish that it holds no pages. Returns what was removed, rank by rank.

        model, tenant, dp_rank: limit the removal; None means all.
        """
        removed = [
            engine
            for engine in (reader.engine for reader in self._readers.values())
            if engine.worker == worker
            and model in (None, engine.model)
            and tenant in (None, engine.tenant)
            and dp_rank in (None, engine.dp_rank)
        ]
        await asyncio.shield(asyncio.gather(*(self._stop(_key(engine)) for engine in removed)))
        return removed

    def status(self) -> list[EngineStatus]:
        return [reader.status() for reader in list(self._readers.values())]

    async def close(self, deadline_s: float = 5.0) -> None:
        """Stop reading, publish what is queued for at most `deadline_s`, stop the sink. Routers keep the views."""
        readers, stopping = list(self._readers.values()), list(self._stopping.values())
        self._readers.clear()
        await asyncio.gather(*(reader.stop(deadline_s, clear=False) for reader in readers), *stopping)
        await self._sink.stop()
        self._registry.threads.close()
        self._context.destroy(linger=0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stop(self, key: _Key) -> asyncio.Task[None]:
        stopping = self._readers.pop(key).stop(_REMOVAL_S, clear=True)
        task = self._stopping[key] = asyncio.create_task(stopping, name=f"bridge-stop:{key}")
        task.add_done_callback(lambda _: self._stopping.pop(key))
        return task


def _key(engine: EngineSettings) -> _Key:
    """Identity of one rank. An address with self-named workers counts as one."""
    if engine.worker is None:
        return None, engine.tenant, engine.endpoint, 0
    return engine.worker, engine.tenant, engine.model or "", engine.dp_rank
