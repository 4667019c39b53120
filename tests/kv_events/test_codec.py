"""Decoders of batches, requests and decisions accept what keeps the contract, and reject the rest with a reason."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_events.codec import (
    RemovedPages,
    StoredPages,
    batch_head,
    decode_batch,
    decode_resync,
    encode_resync,
    extra_keys,
    stores_with_tokens,
    wire_events,
)
from kv_events.decisions import VERSION, Candidate, Decision, DecisionRecord, Outcome, decode_decision, encode_decision
from kv_events.errors import InvalidValueError, RecordRejectedError
from kv_events.limits import MAX_CANDIDATES, MAX_PAGES_PER_DECISION, MAX_RECORD_BYTES
from kv_events.schema import SCHEMA_VERSION, AllBlocksCleared, ResyncRequest, SnapshotBegin, SnapshotEnd, StorageMedium
from tests.support.log.records import Stream, digest_of, removed, stored, words


def fields(*events: object) -> list[object]:
    """A valid record as a plain list, to be damaged."""
    decoded: list[object] = msgspec.msgpack.decode(Stream().batch(stored((0, [1, 2, 3]))).payload)
    if events:
        decoded[9] = list(events)
    return decoded


def reject(record: list[object]) -> RecordRejectedError:
    with pytest.raises(RecordRejectedError) as caught:
        decode_batch(msgspec.msgpack.encode(record))
    return caught.value


def test_a_batch_survives_a_round_trip() -> None:
    stream = Stream("worker/1", model="org/model", tenant="t", dp_rank=3, block_size=16)
    record = stream.batch(
        SnapshotBegin("why"), stored((0, [1, 2]), (9, [3]), tier=1), removed([2], tier=1), SnapshotEnd(), now=5.5
    )
    batch = decode_batch(record.payload)
    assert (batch.stream, batch.block_size, batch.epoch, batch.seq, batch.timestamp) == (stream.id, 16, 1, 0, 5.5)
    begin, pages, gone, end = batch.steps
    assert begin == SnapshotBegin("why")
    assert end == SnapshotEnd()
    assert isinstance(pages, StoredPages)
    assert (pages.medium, pages.hashes.tolist(), pages.parents.tolist()) == (1, [1, 2, 3], [0, 9])
    assert not pages.hashes.flags.owndata  # read in place
    assert pages.chain_starts.tolist() == [0b101]
    assert isinstance(gone, RemovedPages)
    assert (gone.medium, gone.hashes.tolist()) == (1, [2])
    assert batch.digest.tobytes() == digest_of({(1, 1), (3, 1)})


def test_a_degraded_reason_is_read_back_and_costs_nothing_where_there_is_none() -> None:
    assert decode_batch(Stream().batch(degraded_reason="batches lost").payload).degraded_reason == "batches lost"
    assert len(fields()) == 11
    assert decode_batch(msgspec.msgpack.encode(fields())).degraded_reason == ""


@pytest.mark.parametrize("degraded_reason", ["ü" * 129, "x" * 257, 7, None])
def test_a_degraded_reason_is_a_short_text(degraded_reason: object) -> None:
    assert reject([*fields(), degraded_reason]).reason == "field"
    assert decode_batch(msgspec.msgpack.encode([*fields(), "ü" * 128])).degraded_reason == "ü" * 128


def test_what_only_a_newer_minor_version_knows_is_ignored_and_another_major_version_is_refused() -> None:
    record = [*fields(["BlockMoved", 1, 2], ["AllBlocksCleared"]), "", "new", 7]
    assert reject(record).reason == "field"
    record[0] = SCHEMA_VERSION + 1
    newer = msgspec.msgpack.encode(record)
    assert decode_batch(newer).steps == list(wire_events(newer)) == [AllBlocksCleared()]
    assert (extra_keys(newer), stores_with_tokens(newer)) == ([], [])
    record[0] = 2 << 8
    assert reject(record).reason == "schema_version"


@pytest.mark.parametrize(
    ("position", "value", "named"),
    [
        (1, "", "model"),
        (2, "x" * 300, "tenant"),
        (3, 7, r"\$\[3\]"),
        (4, -1, "dp_rank: got -1"),
        (4, 1.5, r"\$\[4\]"),
        (5, 0, "block_size: got 0"),
        (5, 10**9, "block_size: got 1000000000"),
        (6, -5, "epoch: got -5"),
        (7, -1, "seq: got -1"),
        (7, 2**64 - 1, "seq: got"),
        (8, float("nan"), "timestamp"),
        (10, b"short", "digest: 5 bytes"),
    ],
)
def test_a_bad_field_is_named_with_its_value(position: int, value: object, named: str) -> None:
    record = fields()
    record[position] = value
    error = reject(record)
    assert error.reason == "field"
    assert re.search(named, str(error))


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (["BlockStored", "FLOPPY", words([1]), words([1]), b"\1", words([0])], "medium"),
        (["BlockStored", "GPU", b"1234567", words([1]), b"\1", words([0])], "hash_count"),
        (["BlockStored", "GPU", words([1, 2]), words([1]), b"\1", words([0])], "hash_count"),
        (["BlockStored", "GPU", words([1, 2]), words([1, 2]), b"\1", words([0, 1])], "hash_count"),
        (["BlockStored", "GPU", words([1, 2]), words([1, 2]), b"\2", words([0])], "hash_count"),
        (["BlockStored", "GPU", words([1, 2]), words([1, 2]), b"\5", words([0, 0])], "hash_count"),
        (["BlockStored", "GPU", words([1, 2]), words([1, 2]), b"\1\0", words([0])], "hash_count"),
        (["BlockRemoved", "GPU", words([1, 2]), words([1])], "hash_count"),
        (["BlockRemoved", "GPU", [1, 2], words([1])], "field"),
        (["BlockRemoved"], "field"),
        ("BlockRemoved", "field"),
    ],
)
def test_a_bad_event_rejects_the_whole_record(event: object, reason: str) -> None:
    assert reject(fields(["AllBlocksCleared"], event)).reason == reason


def test_too_many_pages_or_events_or_bytes_are_refused() -> None:
    many = list(range(1, 40_000))
    assert reject(fields(["BlockRemoved", "GPU", words(many), words(many)])).reason == "batch_size"
    assert reject(fields(*[["AllBlocksCleared"]] * 5000)).reason == "batch_size"
    with pytest.raises(RecordRejectedError, match="record_size"):
        decode_batch(bytes(MAX_RECORD_BYTES + 1))


def test_media_are_their_strings() -> None:
    assert [m.value for m in StorageMedium] == ["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]
    assert StorageMedium.CPU == "CPU_PINNED"  # type: ignore[comparison-overlap]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(StorageMedium.CPU)) == "CPU_PINNED"


def test_the_time_of_a_batch_is_read_without_its_events() -> None:
    head = batch_head(Stream("w").batch(stored((0, [1])), now=5.5).payload)
    assert head is not None
    assert head.timestamp == 5.5
    assert batch_head(b"\xc1") is None


def test_a_resync_request_survives_a_round_trip() -> None:
    request = ResyncRequest("default/m/w/0", 5, "gap")
    assert decode_resync(encode_resync(request)) == request
    with pytest.raises(RecordRejectedError):
        decode_resync(b"\xc1")


# --- decisions and their outcomes -----------------------------------------------------------------------------------

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
        "candidates": (Candidate("w0", 1, 32, 30.5), Candidate("w1", None, 48, -1.0)),
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
        (decision(candidates=(Candidate("", None, 0, 0.0),)), r"candidates\[0\].worker"),
        (decision(candidates=(Candidate("w", None, -1, 0.0),)), r"candidates\[0\].tokens"),
        (decision(candidates=(Candidate("w", None, 0, float("nan")),)), r"candidates\[0\].score"),
        (decision(candidates=(Candidate("w", None, 0, 0.0),) * (MAX_CANDIDATES + 1)), "candidates"),
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
        candidates=(Candidate("w" * 256, 65_535, 2**40, 1.5),) * MAX_CANDIDATES,
    )
    payload = encode_decision(largest)
    assert len(payload) < MAX_RECORD_BYTES
    assert decode_decision(payload) == largest
