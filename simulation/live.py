"""The live mode: running publishers, a log and a consumer, in one event loop and in real time.

The router sees events with a small delay, as real routers do, so two runs differ slightly.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from indexer.applier import Applier, DeadLetters
from indexer.consumer import Consumer
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.sources.base import Source
from indexer.sources.memory import MemorySource
from indexer.views import View, ViewState
from kv_events.codec import DecodedBatch
from kv_events.errors import KvsightError
from kv_events.kafka.settings import KafkaSettings
from kv_events.log.memory import MemoryLog
from kv_events.streams import StreamId
from publisher import EventPublisher, PublisherSettings, Sink
from publisher.sinks.memory import MemorySink
from simulation.policy_run import PolicyRun, Progress, create_publishers
from simulation.report import PolicyReport
from simulation.settings import SimulationSettings
from simulation.workload import Requests

_SYNC_S = 60.0
_POLL_S = 0.01
_FLUSH_S = 5.0


class SimulationError(KvsightError):
    """A part of a live fleet has ended, or a view did not catch up in time."""


class Transport(NamedTuple):
    """A log that a fleet writes and a router reads."""

    sink: Callable[[PublisherSettings], Sink]
    """Returns the writing end for one publisher."""
    source: Callable[[], Source]
    """Returns a reading end."""


def memory_transport(log: MemoryLog) -> Transport:
    """Return the ends of a log in memory."""
    return Transport(lambda _: MemorySink(log), lambda: MemorySource(log))


def kafka_transport(kafka: KafkaSettings) -> Transport:
    """Return the ends of the topics of a broker."""
    from indexer.sources.kafka import KafkaSource
    from publisher.sinks.kafka import KafkaSink

    return Transport(lambda own: KafkaSink(own.model_copy(update=dict(kafka))), lambda: KafkaSource(kafka))


class LiveFleet:
    """Workers with running publishers, and the consumer that watches them."""

    def __init__(self, settings: SimulationSettings, policy: str, transport: Transport, consumer: Consumer) -> None:
        """consumer: a running one."""
        publishers = create_publishers(settings, policy, transport.sink)
        self.publishers = [each for own in publishers for each in own.values()]
        self.consumer = consumer
        self._applied: dict[StreamId, tuple[int, int]] = {}
        """Epoch and seq of the newest batch of each stream that is applied completely.

        A view counts a batch from its first slice on."""
        consumer.applier.on_applied.append(self._note_applied)
        self.run = PolicyRun(policy, settings, publishers, consumer.namespaces, consumer.freshness)

    async def wait_until_synced(self, deadline_s: float = _SYNC_S) -> None:
        """Wait until every view is as new as its worker. Raises SimulationError."""
        give_up_at = time.monotonic() + deadline_s
        while late := [each for each in self.publishers if not self._is_seen(each)]:
            self._check_alive(late)
            if time.monotonic() > give_up_at:
                stats = late[0].stats()
                waited = f"{len(late)} views are not up to date after {deadline_s:.0f} s"
                raise SimulationError(f"{waited}; {late[0].stream.key}: {stats}, source: {self.consumer.log_outage}")
            await asyncio.sleep(_POLL_S)

    def _is_seen(self, publisher: EventPublisher) -> bool:
        view = self.consumer.namespaces.view(publisher.stream)
        stats = publisher.stats()
        if view is None or stats.queued or stats.in_flight or stats.is_resyncing:
            return False
        # a late one counts only with the next heartbeat
        is_newest = self._applied.get(publisher.stream) == (publisher.epoch, stats.next_seq - 1)
        return is_newest and self.consumer.freshness.state(view) is ViewState.LIVE

    def _check_alive(self, publishers: list[EventPublisher]) -> None:
        if self.consumer.failure is not None:
            raise SimulationError(f"the consumer has ended: {self.consumer.failure!r}")
        for publisher in publishers:
            failure = publisher.stats().failure
            if failure is not None:
                raise SimulationError(f"publisher {publisher.stream.key} has ended: {failure}")

    def _note_applied(self, view: View, batch: DecodedBatch) -> None:
        self._applied[view.stream] = (batch.epoch, batch.seq)


@asynccontextmanager
async def live_fleet(settings: SimulationSettings, policy: str, transport: Transport) -> AsyncIterator[LiveFleet]:
    """Run a fleet and its router inside the block. See `publishing_fleet`."""
    indexer = IndexerSettings.ignoring_environment()
    consumer = Consumer(transport.source(), Applier(Namespaces(indexer), DeadLetters()), indexer)
    async with consumer.running(), publishing_fleet(settings, policy, transport, consumer) as fleet:
        yield fleet


@asynccontextmanager
async def publishing_fleet(
    settings: SimulationSettings, policy: str, transport: Transport, consumer: Consumer
) -> AsyncIterator[LiveFleet]:
    """Run a fleet that publishes inside the block, for a running consumer. All views are up to date at its beginning.

    Publishers close at the same time, because each may wait for a broker; after an error they close without waiting.
    Raises SimulationError.
    """
    fleet = LiveFleet(settings, policy, transport, consumer)
    flush_s = 0.0
    try:
        for publisher in fleet.publishers:
            await publisher.start()
        await fleet.wait_until_synced()
        yield fleet
        flush_s = _FLUSH_S
    finally:
        await asyncio.gather(*(each.aclose(flush_s) for each in fleet.publishers))


async def run_live(
    requests: Requests,
    settings: SimulationSettings,
    policy: str,
    transport: Transport,
    progress: Progress | None = None,
) -> PolicyReport:
    """Run one policy over the whole workload without pauses. Raises InvalidValueError or SimulationError."""
    began = time.perf_counter()
    async with live_fleet(settings, policy, transport) as fleet:
        for request in requests:
            fleet.run.step(request)
            fleet.run.show(progress, len(requests))
            await asyncio.sleep(0)  # lets publishers and consumer run
        await fleet.wait_until_synced()
        return fleet.run.report(time.perf_counter() - began)
