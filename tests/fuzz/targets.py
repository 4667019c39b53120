"""Every decoder of untrusted bytes, as a function that may fail only in the way that it documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.fuzz.client_inputs import ANSWERS, FEED, run_answer, run_feed
from tests.fuzz.engine_floods import FLOODS, FloodTarget
from tests.fuzz.engine_inputs import PAYLOADS, POLLED, BridgeTarget, run_polled
from tests.fuzz.http_inputs import (
    DECISIONS,
    QUERIES,
    REGISTRATIONS,
    HttpTarget,
    LaneTarget,
    decision_records,
    run_decision,
    run_registration,
)
from tests.fuzz.log_inputs import (
    SNAPSHOT_BODY,
    RecordTarget,
    published_records,
    records,
    run_published,
    run_segment,
    run_snapshot,
    segment,
)
from tests.fuzz.message_inputs import (
    FRAMES,
    NUMBERED,
    REQUESTS,
    TOPICS,
    FramesTarget,
    ReplayTarget,
    run_messages,
    run_request,
)


class Target(NamedTuple):
    """One decoder."""

    examples: Sequence[bytes]
    """Valid inputs."""
    run: Callable[[bytes], None]
    """Must not raise, for any bytes."""


def targets() -> dict[str, Target]:
    """Return new targets by name."""
    return {
        "bridge payload": Target(PAYLOADS, BridgeTarget()),
        "engine flood": Target(FLOODS, FloodTarget()),
        "polled events": Target(POLLED, run_polled),
        "frames": Target(FRAMES, FramesTarget()),
        "topic": Target(TOPICS, run_messages),
        "replay": Target(NUMBERED, ReplayTarget()),
        "replay request": Target(REQUESTS, run_request),
        "record": Target(records(), RecordTarget()),
        "published record": Target(published_records(), run_published),
        "segment": Target([segment()], run_segment),
        "snapshot": Target([SNAPSHOT_BODY], run_snapshot),
        "query": Target([*QUERIES, *DECISIONS], HttpTarget()),
        "decision": Target(decision_records(), run_decision),
        "fast path": Target(QUERIES, LaneTarget()),
        "registration": Target(REGISTRATIONS, run_registration),
        "answer": Target(ANSWERS, run_answer),
        "feed": Target([FEED], run_feed),
    }
