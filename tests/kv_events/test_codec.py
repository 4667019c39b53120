"""The decoder accepts only records that keep the contract, and rejects others with a reason."""

from __future__ import annotations

import contextlib
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.codec import (
    RemovedPages,
    StoredPages,
    decode_batch,
    decode_resync,
    encode_resync,
)
from kv_events.errors import RecordRejectedError
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.schema import (
    SCHEMA_VERSION,
    AllBlocksCleared,
    PackedStored,
    ResyncRequest,
    SnapshotBegin,
    SnapshotEnd,
    StorageMedium,
)
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
    assert pages.chain_starts.tolist() == [0b101]
    assert isinstance(gone, RemovedPages)
    assert (gone.medium, gone.hashes.tolist()) == (1, [2])
    assert batch.digest.tobytes() == digest_of({(1, 1), (3, 1)})


def test_the_record_key_cannot_imitate_another_stream() -> None:
    assert Stream("a/b").id.key != Stream("b", model="m/a").id.key
    assert Stream("a/b%", model="x/y", tenant="ü", dp_rank=2).id.key == "%C3%BC/x%2Fy/a%2Fb%25/2"


def test_a_page_costs_at_most_24_bytes_in_chains_of_four_and_a_batch_200_more() -> None:
    stream = Stream("engine-0.engines.svc:5557", model="meta-llama/Llama-3.1-70B-Instruct")
    chains = [(2**63 + i, [2**63 + 4 * i + j for j in range(4)]) for i in range(1000)]
    assert len(stream.batch(stored(*chains)).payload) <= 24 * 4000 + 200
    assert len(stream.batch().payload) <= 200


def test_trailing_fields_of_a_newer_writer_are_ignored() -> None:
    record = [*fields(), "", "new", 7]
    record[0] = SCHEMA_VERSION + 1
    assert len(decode_batch(msgspec.msgpack.encode(record)).steps) == 1


def test_a_degraded_reason_is_read_back_and_costs_nothing_where_there_is_none() -> None:
    assert decode_batch(Stream().batch(degraded_reason="batches lost").payload).degraded_reason == "batches lost"
    assert len(fields()) == 11
    assert decode_batch(msgspec.msgpack.encode(fields())).degraded_reason == ""


@pytest.mark.parametrize("degraded_reason", ["ü" * 129, "x" * 257, 7, None])
def test_a_degraded_reason_is_a_short_text(degraded_reason: object) -> None:
    assert reject([*fields(), degraded_reason]).reason == "field"
    assert decode_batch(msgspec.msgpack.encode([*fields(), "ü" * 128])).degraded_reason == "ü" * 128


def test_unknown_events_are_ignored_only_from_a_newer_minor_version() -> None:
    record = fields(["BlockMoved", 1, 2], ["AllBlocksCleared"])
    assert reject(record).reason == "field"
    record[0] = SCHEMA_VERSION + 1
    assert decode_batch(msgspec.msgpack.encode(record)).steps == [AllBlocksCleared()]


def test_another_major_version_is_refused() -> None:
    record = fields()
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


@given(st.data())
def test_damaged_bytes_are_rejected_or_decode_but_never_raise_anything_else(data: st.DataObject) -> None:
    payload = bytearray(Stream().batch(stored((0, [1, 2, 3])), removed([1]), AllBlocksCleared()).payload)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RecordRejectedError):
        decode_batch(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(payload: bytes) -> None:
    with pytest.raises(RecordRejectedError):
        decode_batch(payload)


def test_media_are_their_strings() -> None:
    assert [m.value for m in StorageMedium] == ["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]
    assert StorageMedium.CPU == "CPU_PINNED"  # type: ignore[comparison-overlap]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(StorageMedium.CPU)) == "CPU_PINNED"


def test_a_resync_request_survives_a_round_trip() -> None:
    request = ResyncRequest("default/m/w/0", 5, "gap")
    assert decode_resync(encode_resync(request)) == request
    with pytest.raises(RecordRejectedError):
        decode_resync(b"\xc1")


def test_hashes_are_read_in_place() -> None:
    batch = decode_batch(Stream().batch(stored((0, [1, 2, 3]))).payload)
    pages = batch.steps[0]
    assert isinstance(pages, StoredPages)
    assert not pages.hashes.flags.owndata
    assert isinstance(pages.hashes, np.ndarray)
    assert isinstance(stored((0, [1])), PackedStored)
