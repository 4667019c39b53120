"""Makes the recording that `examples/debug_a_routing_anomaly.md` looks into: five minutes of three simulated engines.

    python examples/record_a_routing_anomaly.py FOLDER

The engines have real radix caches and real publishers; only their clock is simulated, so that every run is the same. A
router sends each request to the engine that holds most of its prompt, and records its decisions. From 12:02 on, a batch
job sends long prompts to engine-1 directly, past the router.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kv_events.decisions import VERSION, Candidate, Decision, Outcome, encode_decision
from kv_events.hashing import sequence_hashes
from kv_events.log.event_log import EventLogWriter
from kv_events.log.memory import MemoryLog
from kv_events.records import Channel, LogRecord
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.memory import MemorySink
from simulation import SimulatedWorker, SimulationSettings, create_cache
from simulation.workload import Request

NOON = 1_769_860_800  # 2026-01-31T12:00:00Z
MODEL, PAGE = "my-model", 16
ENGINES = ("engine-0", "engine-1", "engine-2")
CAPACITY_PAGES = 256
HEARTBEAT_S, QUEUE_S, ANSWER_S = 2.0, 0.2, 0.3
SYSTEM_PAGES, TURN_PAGES, JOB_PAGES = 32, 8, 96
TURNS_AT = (20, 50, 80, 110, 190)  # seconds after noon; the last one is at 12:03:10
JOB_FROM, JOB_TO, JOB_EVERY = 120, 180, 10
END = 300


class Step(NamedTuple):
    """A request that arrives at some moment."""

    at_s: float
    name: str
    tokens: list[int]
    engine: str | None = None
    """Where it is sent. None: the router decides."""


@dataclass
class Fleet:
    """The engines, and the log of what they and the router say."""

    writer: EventLogWriter
    now: float = NOON
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unused = MemorySink(MemoryLog())  # these publishers are never started, so the sink is not used
        for engine in ENGINES:
            settings = PublisherSettings(model=MODEL, worker=engine, block_size=PAGE, heartbeat_s=HEARTBEAT_S)
            cache = create_cache(SimulationSettings(capacity_tokens=CAPACITY_PAGES * PAGE, page_size=PAGE))
            self.workers[engine] = SimulatedWorker(EventPublisher(settings, unused), cache)

    def publish(self, *, force: bool) -> None:
        """Write the records that are due. force: all that there are."""
        for worker in self.workers.values():
            for out in worker.publisher.take_records(self.now, force=force):
                self._write(out.key, out.payload, Channel.EVENTS)

    def serve(self, step: Step) -> None:
        """Let an engine serve a request. The router's decision and its outcome are recorded."""
        request = Request(step.at_s, np.array(step.tokens, np.uint32))
        if step.engine is not None:
            self.workers[step.engine].serve(request)
            return self.publish(force=True)
        held = {engine: worker.match_length(request) for engine, worker in self.workers.items()}
        chosen = max(held, key=lambda engine: (held[engine], -len(engine)))
        self._decide(step, chosen, held)
        self.now += QUEUE_S
        served = self.workers[chosen].serve(request)
        self.publish(force=True)
        self.now += ANSWER_S
        outcome = Outcome(VERSION, step.name, self.now, served.found_tokens)
        self._write(step.name.encode(), encode_decision(outcome), Channel.DECISIONS)
        return None

    def _decide(self, step: Step, chosen: str, held: dict[str, int]) -> None:
        hashes = sequence_hashes(step.tokens, PAGE).astype("<u8").tobytes()
        candidates = tuple(Candidate(engine, None, tokens, float(tokens)) for engine, tokens in held.items())
        of_request = (VERSION, step.name, self.now, MODEL, "default", PAGE, len(step.tokens), hashes)
        decision = Decision(*of_request, chosen, None, held[chosen], candidates)
        self._write(step.name.encode(), encode_decision(decision), Channel.DECISIONS)

    def _write(self, key: bytes, payload: bytes, channel: Channel) -> None:
        self.writer.append(LogRecord(0, self.writer.next_index, int(self.now * 1000), key, payload, channel))


def steps() -> Iterator[Step]:
    """The requests of the five minutes."""
    system, chat = _tokens("system", SYSTEM_PAGES), _tokens("chat", TURN_PAGES * len(TURNS_AT))
    for number, engine in enumerate(ENGINES):
        yield Step(2.0 * number, f"warm-up-{number}", [*system, *_tokens(engine, 2)], engine)
    for number, at_s in enumerate(TURNS_AT, 1):
        first_of_chat = ENGINES[1] if number == 1 else None
        yield Step(at_s, f"chat-turn-{number}", [*system, *chat[: number * TURN_PAGES * PAGE]], first_of_chat)
    for number, at_s in enumerate(range(JOB_FROM, JOB_TO, JOB_EVERY)):
        yield Step(at_s + 0.5, f"job-{number}", _tokens(f"job-{number}", JOB_PAGES), ENGINES[1])
    for number, at_s in enumerate(range(30, END, 20)):
        yield Step(at_s + 5.0, f"question-{number}", [*system, *_tokens(f"question-{number}", 2)])


def record(folder: Path) -> None:
    """Write the log."""
    with EventLogWriter(folder) as writer:
        fleet = Fleet(writer)
        for step in sorted(steps()):
            while fleet.now + HEARTBEAT_S < NOON + step.at_s:
                fleet.now += HEARTBEAT_S
                fleet.publish(force=False)
            fleet.now = NOON + step.at_s
            fleet.serve(step)


def _tokens(seed: str, pages: int) -> list[int]:
    """Random tokens that are the same in every run."""
    return random.Random(seed).choices(range(100, 20_000), k=pages * PAGE)  # noqa: S311  (no secret)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
