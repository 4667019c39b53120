"""Every decoder of untrusted bytes, as a function that may fail only in the way that it documents."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.fuzz import client_inputs, engine_inputs, http_inputs, log_inputs, message_inputs


class Target(NamedTuple):
    """One decoder."""

    examples: Sequence[bytes]
    """Valid inputs."""
    run: Callable[[bytes], None]
    """Must not raise, for any bytes."""


def targets() -> dict[str, Target]:
    """Return new targets by name."""
    return {
        "bridge payload": Target(engine_inputs.PAYLOADS, engine_inputs.BridgeTarget()),
        "engine flood": Target(engine_inputs.FLOODS, engine_inputs.FloodTarget()),
        "polled events": Target(engine_inputs.POLLED, engine_inputs.run_polled),
        "frames": Target(message_inputs.FRAMES, message_inputs.FramesTarget()),
        "topic": Target(message_inputs.TOPICS, message_inputs.run_messages),
        "replay": Target(message_inputs.NUMBERED, message_inputs.ReplayTarget()),
        "replay request": Target(message_inputs.REQUESTS, message_inputs.run_request),
        "record": Target(log_inputs.records(), log_inputs.RecordTarget()),
        "published record": Target(log_inputs.published_records(), log_inputs.run_published),
        "segment": Target([log_inputs.segment()], log_inputs.run_segment),
        "snapshot": Target([log_inputs.SNAPSHOT_BODY], log_inputs.run_snapshot),
        "query": Target([*http_inputs.QUERIES, *http_inputs.DECISIONS], http_inputs.HttpTarget()),
        "decision": Target(http_inputs.decision_records(), http_inputs.run_decision),
        "fast path": Target(http_inputs.QUERIES, http_inputs.LaneTarget()),
        "registration": Target(http_inputs.REGISTRATIONS, http_inputs.run_registration),
        "answer": Target(client_inputs.ANSWERS, client_inputs.run_answer),
        "feed": Target([client_inputs.FEED], client_inputs.run_feed),
    }
