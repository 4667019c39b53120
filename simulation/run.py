"""Runs of policies over one workload.

Without a broker, publishers feed the index without a log, in simulated time, deterministically and in one thread.
"""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from heapq import heappop, heappush

import uvloop

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from kv_events.decisions import VERSION, DecisionRecord, Outcome, encode_decision
from kv_events.log.event_log import EventLogWriter
from kv_events.log.memory import MemoryLog
from kv_events.records import Channel, LogRecord
from kv_events.reservations import PREFILL_COMPLETE, RELEASED
from publisher import EventPublisher
from publisher.sinks.memory import MemorySink
from simulation.engine import Engine
from simulation.live import kafka_transport, run_live
from simulation.policy_run import PolicyRun, Progress, create_publishers
from simulation.report import Ended, Latency, PolicyReport
from simulation.router import create_policy
from simulation.settings import SimulationSettings
from simulation.workload import Request, Requests


def simulate(
    requests: Requests, settings: SimulationSettings, policies: Sequence[str], progress: Progress | None = None
) -> list[PolicyReport]:
    """Run the workload once for each policy, each time with a fresh fleet.

    With `settings.kafka` the events pass through a broker, in a new event loop; inside a running loop, use
    `live.run_live`. Before anything runs, raises InvalidValueError for a policy that is not in `POLICIES`, and
    KafkaUnreachableError for a broker that cannot be used. Also raises SimulationError and EventLogError.
    """
    for policy in policies:
        create_policy(policy, settings.seed)
    if settings.kafka is None:
        return [run_direct(requests, settings, policy, progress) for policy in policies]
    from kv_events.kafka.connection import KafkaConnection

    uvloop.run(KafkaConnection(settings.kafka).check())
    transport = kafka_transport(settings.kafka)
    return [uvloop.run(run_live(requests, settings, policy, transport, progress)) for policy in policies]


def run_direct(
    requests: Requests, settings: SimulationSettings, policy: str, progress: Progress | None = None
) -> PolicyReport:
    """Run one policy over the whole workload, with engines that need time. Raises the errors of `PolicyRun` and of the
    event log."""
    began = time.perf_counter()
    log = None if settings.event_log_dir is None else EventLogWriter(settings.event_log_dir / policy)
    with log or nullcontext():
        fleet = TimedFleet(settings, policy, log)
        for request in requests:
            fleet.arrive(request._replace(arrival_s=request.arrival_s / settings.speed))
            fleet.run.show(progress, len(requests))
        fleet.run_until(math.inf)
        fleet.run.show(progress, len(requests))
    return fleet.report(time.perf_counter() - began)


class TimedFleet:
    """Engines that need time, and the clock of all of them. Publishers are never started, but polled for records."""

    def __init__(self, settings: SimulationSettings, policy: str, log: EventLogWriter | None = None) -> None:
        unused = MemorySink(MemoryLog())  # these publishers are never started
        self._publishers = create_publishers(settings, policy, lambda _: unused)
        indexer = IndexerSettings.ignoring_environment()
        self._applier = Applier(Namespaces(indexer), DeadLetters())
        self._log = log
        self._began_at = self._now = time.time()
        self._freshness = Freshness(indexer.worker_ttl_s, self._now)
        self.run = PolicyRun(policy, settings, self._publishers, self._applier.namespaces, self._freshness)
        self._settings = settings
        self._engines = [Engine(worker, settings.engine) for worker in self.run.workers]
        self._ends: list[tuple[float, int]] = []
        """Heap of (time at which an engine's steps end, number of the engine). Some are outdated."""
        self._ended: list[Ended] = []

    def arrive(self, request: Request) -> None:
        """Route a request at its arrival, after everything that ends before."""
        now = request.arrival_s
        self.run_until(now)
        self.advance(now)
        chosen = self.run.route(request, now)
        self._report(self.run.router.decision(request, chosen, self.run.request_id, self._now))
        self._engines[chosen].add(request, self.run.request_id, now)
        self._schedule(chosen)

    def run_until(self, now: float) -> None:
        """Take all steps that end until then."""
        while self._ends and self._ends[0][0] <= now:
            at, number = heappop(self._ends)
            if self._engines[number].ends_at == at:
                self._finish_steps(number, at)

    def report(self, seconds: float) -> PolicyReport:
        """Return the result, when all requests have ended. seconds: wall-clock time of the run."""
        gaps = [gap for engine in self._engines for gap in engine.gaps]
        objectives = self._settings.ttft_slo_s, self._settings.itl_slo_s
        return self.run.report(seconds, Latency.of(self._ended, gaps, *objectives) if self._ended else None)

    def advance(self, arrival_s: float) -> None:
        """Advance the clock to a time since the workload began, and send what is due, which is mostly heartbeats."""
        self._now = self._began_at + arrival_s
        for own in self._publishers:
            for publisher in own.values():
                self._apply(publisher, force=False)
        self._freshness.note_log_read(self._now)

    def deliver(self, worker: int) -> None:
        """Apply everything that a worker has published."""
        for publisher in self._publishers[worker].values():
            self._apply(publisher, force=True)

    def _finish_steps(self, number: int, at: float) -> None:
        run, engine = self.run, self._engines[number]
        complete, ended = engine.finish()
        self._now = self._began_at + at
        self.deliver(number)
        for job in complete:
            run.note(job.request, number, job.running, at - job.request.arrival_s)
            run.progress(job.request_id, PREFILL_COMPLETE, at)
            self._report(Outcome(VERSION, job.request_id, self._now, job.running.found_tokens))
        for job in ended:
            run.progress(job.request_id, RELEASED, at)
            arrival, num_gaps = job.request.arrival_s, max(1, job.request.num_output - 1)
            self._ended.append(Ended(arrival, job.first_token_at - arrival, (at - job.first_token_at) / num_gaps))
        engine.start(at)
        self._schedule(number)

    def _schedule(self, number: int) -> None:
        ends_at = self._engines[number].ends_at
        if ends_at is not None:
            heappush(self._ends, (ends_at, number))

    def _report(self, decision: DecisionRecord) -> None:
        """Log what was chosen, or what a worker found in its cache."""
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
