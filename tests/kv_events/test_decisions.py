"""Records of decisions and outcomes: what is kept, what is refused, what newer versions may add."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_events.decisions import (
    VERSION,
    Candidate,
    Decision,
    DecisionRecord,
    Outcome,
    decode_decision,
    encode_decision,
)
from kv_events.errors import InvalidValueError, RecordRejectedError
from kv_events.limits import MAX_CANDIDATES, MAX_PAGES_PER_DECISION, MAX_RECORD_BYTES
from kv_events.schema import SCHEMA_VERSION

HASHES = np.arange(3, dtype="<u8").tobytes()


def decision(**fields: Any) -> Decision:
    given: dict[str, Any] = {
        "schema_version": VERSION,
        "request_id": "r",
        "timestamp": 1000.5,
        "model": "m",
        "tenant": "default",
        "block_size": 16,
        "prompt_tokens": 50,
        "sequence_hashes": HASHES,
        "worker": "w0",
        "dp_rank": 1,
        "predicted_tokens": 32,
        "candidates": [Candidate("w0", 1, 32, 30.5), Candidate("w1", None, 48, -1.0)],
    }
    return Decision(**{**given, **fields})


def outcome(**fields: Any) -> Outcome:
    return Outcome(**{"schema_version": VERSION, "request_id": "r", "timestamp": 1001.0, "cached_tokens": 16, **fields})


@pytest.mark.parametrize("record", [decision(), decision(dp_rank=None, predicted_tokens=None), outcome()])
def test_a_record_is_read_as_it_was_written(record: DecisionRecord) -> None:
    assert decode_decision(encode_decision(record)) == record


@pytest.mark.parametrize("record", [decision(), outcome()])
def test_fields_of_a_newer_minor_version_are_ignored(record: DecisionRecord) -> None:
    fields = [*msgspec.msgpack.decode(encode_decision(record)), "new", {"more": 1}]
    fields[1] = SCHEMA_VERSION + 1
    decoded = decode_decision(msgspec.msgpack.encode(fields))
    assert decoded.request_id == record.request_id
    fields[1] = SCHEMA_VERSION + 256
    with pytest.raises(RecordRejectedError, match="schema_version: major 2"):
        decode_decision(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (decision(request_id=""), "request_id"),
        (decision(request_id="x" * 257), "request_id"),
        (decision(timestamp=float("nan")), "timestamp"),
        (decision(timestamp=-1.0), "timestamp"),
        (decision(model=""), "model"),
        (decision(tenant="t" * 257), "tenant"),
        (decision(worker=""), "worker"),
        (decision(block_size=65_537), "block_size"),
        (decision(prompt_tokens=-1), "prompt_tokens"),
        (decision(dp_rank=65_536), "dp_rank"),
        (decision(predicted_tokens=-1), "predicted_tokens"),
        (decision(sequence_hashes=b"1234567"), "sequence_hashes"),
        (decision(sequence_hashes=bytes(8 * (MAX_PAGES_PER_DECISION + 1))), "sequence_hashes"),
        (decision(candidates=[Candidate("", None, 0, 0.0)]), r"candidates\[0\].worker"),
        (decision(candidates=[Candidate("w", None, -1, 0.0)]), r"candidates\[0\].tokens"),
        (decision(candidates=[Candidate("w", None, 0, float("nan"))]), r"candidates\[0\].score"),
        (decision(candidates=[Candidate("w", None, 0, 0.0)] * (MAX_CANDIDATES + 1)), "candidates"),
        (outcome(cached_tokens=-1), "cached_tokens"),
        (outcome(request_id=""), "request_id"),
    ],
)
def test_a_value_beyond_its_limits_is_named_by_writers_and_readers(record: DecisionRecord, field: str) -> None:
    with pytest.raises(InvalidValueError, match=field):
        encode_decision(record)
    with pytest.raises(RecordRejectedError, match=field):
        decode_decision(msgspec.msgpack.encode(record))


def test_the_largest_record_fits_into_the_log() -> None:
    largest = decision(
        request_id="r" * 256,
        sequence_hashes=bytes(8 * MAX_PAGES_PER_DECISION),
        candidates=[Candidate("w" * 256, 65_535, 2**40, 1.5)] * MAX_CANDIDATES,
    )
    payload = encode_decision(largest)
    assert len(payload) < MAX_RECORD_BYTES
    assert decode_decision(payload) == largest


def test_damaged_records_are_refused_and_nothing_else_is_raised() -> None:
    rng = random.Random(7)
    good = encode_decision(decision())
    for _ in range(3000):
        data = bytearray(good[: rng.randrange(len(good) + 1)] if rng.random() < 0.3 else good)
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        with suppress(RecordRejectedError):
            decode_decision(bytes(data))
