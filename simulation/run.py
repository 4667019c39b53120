"""Runs of policies over one workload.

Without a broker, publishers feed the index without a log, in simulated time, deterministically and in one thread.
"""

import contextlib
import time
from collections.abc import Sequence

import uvloop

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from kv_events.decisions import VERSION, DecisionRecord, Outcome, encode_decision
from kv_events.kafka.connection import KafkaConnection
from kv_events.log.event_log import EventLogWriter
from kv_events.log.memory import MemoryLog
from kv_events.records import Channel, LogRecord
from publisher import EventPublisher
from publisher.sinks.memory import MemorySink
from simulation.live import kafka_transport, run_live
from simulation.policies import create_policy
from simulation.policy_run import PolicyRun, Progress, create_publishers
from simulation.report import PolicyReport
from simulation.settings import SimulationSettings
from simulation.workload import Request, Requests


def simulate(
    requests: Requests,
    settings: SimulationSettings,
    policies: Sequence[str],
    progress: Progress | None = None,
) -> list[PolicyReport]:
    """Run the workload once for each policy, each time with a fresh fleet.

    With `settings.kafka` the events pass through a broker, in a new event loop; inside a running loop, use
    `live.run_live`. Before anything runs, raises InvalidValueError for a policy that is not in `POLICIES`, and
    KafkaUnreachableError for a broker that cannot be used. Also raises SimulationError and EventLogError.
    """
    for policy in policies:
        create_policy(policy, settings.workers, settings.seed)
    if settings.kafka is None:
        return [run_direct(requests, settings, policy, progress) for policy in policies]
    uvloop.run(KafkaConnection(settings.kafka).check())
    transport = kafka_transport(settings.kafka)
    return [uvloop.run(run_live(requests, settings, policy, transport, progress)) for policy in policies]


def run_direct(
    requests: Requests, settings: SimulationSettings, policy: str, progress: Progress | None = None
) -> PolicyReport:
    """Run one policy over the whole workload. Raises the errors of `PolicyRun` and of the event log."""
    began = time.perf_counter()
    with contextlib.ExitStack() as closing:
        log = None
        if settings.event_log_dir is not None:
            log = closing.enter_context(EventLogWriter(settings.event_log_dir / policy))
        fleet = DirectFleet(settings, policy, log)
        for request in requests:
            fleet.serve(request)
            fleet.run.show(progress, len(requests))
    return fleet.run.report(time.perf_counter() - began)


class DirectFleet:
    """Polls publishers that are not started for their records, with a clock that advances only between arrivals."""

    def __init__(self, settings: SimulationSettings, policy: str, log: EventLogWriter | None = None) -> None:
        unused = MemorySink(MemoryLog())  # these publishers are never started
        self._publishers = create_publishers(settings, policy, lambda _: unused)
        indexer = IndexerSettings.ignoring_environment()
        self._applier = Applier(Namespaces(indexer), DeadLetters())
        self._log = log
        self._num_decisions = 0
        self._began_at = self._now = time.time()
        self._freshness = Freshness(indexer.worker_ttl_s, self._now)
        self.run = PolicyRun(policy, settings, self._publishers, self._applier.namespaces, self._freshness)

    def serve(self, request: Request) -> int:
        """Route and serve a request and apply its events. Returns the number of the worker that served it.

        The log also receives what the router chose and what the worker reused.
        """
        self.advance(request.arrival_s)
        chosen = self.run.step(request)
        self._num_decisions += 1
        request_id = str(self._num_decisions)
        self._report(self.run.router.decision(request, chosen, request_id, self._now))
        self.deliver(chosen)
        self._report(Outcome(VERSION, request_id, self._now, self.run.found_tokens))
        return chosen

    def advance(self, arrival_s: float) -> None:
        """Advance the clock and send what is due, which is mostly heartbeats."""
        self._now = self._began_at + arrival_s
        for own in self._publishers:
            for publisher in own.values():
                self._apply(publisher, force=False)
        self._freshness.note_log_read(self._now)

    def deliver(self, worker: int) -> None:
        """Apply everything that a worker has published."""
        for publisher in self._publishers[worker].values():
            self._apply(publisher, force=True)

    def _report(self, decision: DecisionRecord) -> None:
        if self._log is not None:
            payload, key = encode_decision(decision), decision.request_id.encode()
            ms = int(decision.timestamp * 1000)
            self._log.append(LogRecord(0, self._log.next_index, ms, key, payload, Channel.DECISIONS))

    def _apply(self, publisher: EventPublisher, *, force: bool) -> None:
        for out in publisher.take_records(self._now, force=force):
            record = LogRecord(0, self._applier.records, out.timestamp_ms, out.key, out.payload)
            if self._log is not None:
                self._log.append(record)
            for _ in self._applier.apply(record, self._now):
                pass
