"""Encoding and decoding of records. Encoders and decoders are built once; `decode_batch` checks the whole contract.

Version rule: the same major version, any minor. Trailing fields of newer writers and event tags of newer minor versions
are ignored. Any other deviation raises `RecordRejectedError`.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kv_events import limits, schema
from kv_events.digest import DIGEST_BYTES, Digest
from kv_events.errors import RecordRejectedError
from kv_events.streams import StreamId

_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(schema.DegradedBatch)
_head_decoder = msgspec.msgpack.Decoder(schema.BatchHead)
_event_decoder = msgspec.msgpack.Decoder(schema.WireEvent)
_control_decoder = msgspec.msgpack.Decoder(schema.ResyncRequest)


class StoredPages(NamedTuple):
    """A checked `PackedStored` in the form that kernels need. Arrays are read-only views of the record."""

    medium: int
    """Tier index, 0 to 3."""
    hashes: npt.NDArray[np.uint64]
    """[n] sequence hashes."""
    block_hashes: npt.NDArray[np.uint64]
    """[n] block hashes."""
    chain_starts: npt.NDArray[np.uint8]
    """[ceil(n / 8)] bitmap, see `PackedStored`."""
    parents: npt.NDArray[np.uint64]
    """[chains] sequence hash of the page before each chain; 0 if there is none."""


class RemovedPages(NamedTuple):
    """A checked `PackedRemoved` in the form that kernels need."""

    medium: int
    hashes: npt.NDArray[np.uint64]
    block_hashes: npt.NDArray[np.uint64]


Step: TypeAlias = StoredPages | RemovedPages | schema.AllBlocksCleared | schema.SnapshotBegin | schema.SnapshotEnd


class BatchPages(NamedTuple):
    """The pages of a batch by medium."""

    stored: Counter[str]
    removed: Counter[str]


class DecodedBatch(NamedTuple):
    """One checked record of the log. `steps` is empty in a heartbeat."""

    stream: StreamId
    block_size: int
    epoch: int
    seq: int
    timestamp: float
    steps: list[Step]
    digest: Digest
    """uint64[8], read-only: digest of the pages that the worker holds after this batch."""
    degraded_reason: str = ""
    """Why the publisher reports that its stream may be incomplete. "" if there is no reason."""

    def pages(self) -> BatchPages:
        counts = BatchPages(Counter(), Counter())
        for step in self.steps:
            if isinstance(step, StoredPages | RemovedPages):
                counted = counts.stored if isinstance(step, StoredPages) else counts.removed
                counted[schema.MEDIA[step.medium].value] += len(step.hashes)
        return counts


def encode_batch(
    stream: StreamId,
    block_size: int,
    epoch: int,
    seq: int,
    timestamp: float,
    events: list[bytes],
    digest: bytes,
    degraded_reason: str = "",
) -> bytes:
    """Encode one record. events: results of `encode_event`. digest: 64 bytes. degraded_reason: see `DegradedBatch`."""
    raw = [msgspec.Raw(event) for event in events]
    fields = (schema.SCHEMA_VERSION, *stream, block_size, epoch, seq, timestamp, raw, digest)
    return _encoder.encode(
        schema.DegradedBatch(*fields, degraded_reason) if degraded_reason else schema.EventBatch(*fields)
    )


def encode_event(event: schema.WireEvent) -> bytes:
    return _encoder.encode(event)


def decode_batch(payload: bytes) -> DecodedBatch:
    """Decode and check one record. Raises RecordRejectedError; never returns part of a record."""
    if len(payload) > limits.MAX_RECORD_BYTES:
        raise RecordRejectedError("record_size", f"{len(payload)} bytes, at most {limits.MAX_RECORD_BYTES}")
    if not payload:
        raise RecordRejectedError("empty", "0 bytes, such as a record without a value")
    batch = schema.decoded(payload, _batch_decoder)
    newer = _check_version(batch.schema_version)
    _check_header(batch)
    steps = [step for raw in batch.events if (step := _decode_step(raw, newer)) is not None]
    _check_totals(batch, steps)
    return DecodedBatch(
        StreamId(batch.model, batch.tenant, batch.worker, batch.dp_rank),
        batch.block_size,
        batch.epoch,
        batch.seq,
        batch.timestamp,
        steps,
        np.frombuffer(batch.digest, "<u8"),
        batch.degraded_reason,
    )


def batch_or_none(payload: bytes) -> DecodedBatch | None:
    """Decode and check one record. Returns None for one that `decode_batch` rejects."""
    try:
        return decode_batch(payload)
    except RecordRejectedError:
        return None


def extra_keys(payload: bytes) -> list[str]:
    """Return the namespaces that the stores of a record name: adapters and salts, see `PackedStored.extra_key`.

    payload: a record that `decode_batch` accepts.
    """
    stores = (event for event in wire_events(payload) if isinstance(event, schema.PackedStored))
    return list(dict.fromkeys(store.extra_key for store in stores if store.extra_key))


def stores_with_tokens(payload: bytes) -> list[schema.PackedStored]:
    """Return the stores of a record that contain tokens. payload: a record that `decode_batch` accepts."""
    return [event for event in wire_events(payload) if isinstance(event, schema.PackedStored) and event.token_ids]


def wire_events(payload: bytes) -> Iterator[schema.WireEvent]:
    """Yield the events of a record, with their tokens. Events that only newer versions know are left out.

    payload: a record that `decode_batch` accepts.
    """
    for raw in _batch_decoder.decode(payload).events:
        with suppress(msgspec.ValidationError):
            yield _event_decoder.decode(raw)


def batch_head(payload: bytes) -> schema.BatchHead | None:
    """Decode a batch without its events, and check nothing. Returns None if the record is no batch.

    The time of the record may be later than that of the batch: Kafka can be configured to replace it.
    """
    try:
        return _head_decoder.decode(payload)
    except schema.UNREADABLE:
        return None


def encode_resync(request: schema.ResyncRequest) -> bytes:
    return _encoder.encode(request)


def decode_resync(payload: bytes) -> schema.ResyncRequest:
    """Decode a message of the control topic. Raises RecordRejectedError."""
    if not 0 < len(payload) <= limits.MAX_CONTROL_BYTES:
        raise RecordRejectedError("control", f"{len(payload)} bytes, expected 1 .. {limits.MAX_CONTROL_BYTES}")
    try:
        return _control_decoder.decode(payload)
    except schema.UNREADABLE as error:
        raise RecordRejectedError("control", str(error)) from None


def _check_version(version: int) -> bool:
    """Check the version. Returns whether the record has a newer minor version than this decoder."""
    if version >> 8 != schema.SCHEMA_MAJOR:
        raise RecordRejectedError("schema_version", f"major {version >> 8}, this decoder reads {schema.SCHEMA_MAJOR}")
    return version > schema.SCHEMA_VERSION


def _check_header(batch: schema.DegradedBatch) -> None:
    for field in ("model", "tenant", "worker"):
        name: str = getattr(batch, field)
        if not name or len(name.encode()) > limits.MAX_NAME_BYTES:
            detail = f"{field}: {len(name)} characters, 1 to {limits.MAX_NAME_BYTES} bytes wanted"
            raise RecordRejectedError("field", detail)
    for field, low, high in (
        ("dp_rank", 0, limits.MAX_DP_RANK),
        ("block_size", 1, limits.MAX_BLOCK_SIZE),
        ("epoch", 0, 2**63 - 1),
        ("seq", 0, 2**63 - 1),
    ):
        value: int = getattr(batch, field)
        if not low <= value <= high:
            raise RecordRejectedError("field", f"{field}: got {value}, expected {low} .. {high}")
    if not math.isfinite(batch.timestamp):
        raise RecordRejectedError("field", f"timestamp: got {batch.timestamp}, expected seconds since 1970")
    if len(batch.digest) != DIGEST_BYTES:
        raise RecordRejectedError("field", f"digest: {len(batch.digest)} bytes, expected {DIGEST_BYTES}")
    if len(batch.degraded_reason.encode()) > (most := limits.MAX_DEGRADED_REASON_BYTES):
        detail = f"degraded_reason: {len(batch.degraded_reason)} characters, at most {most} bytes"
        raise RecordRejectedError("field", detail)
    if len(batch.events) > limits.MAX_EVENTS_PER_BATCH:
        raise RecordRejectedError("batch_size", f"{len(batch.events)} events, at most {limits.MAX_EVENTS_PER_BATCH}")


def _decode_step(raw: msgspec.Raw, newer: bool) -> Step | None:
    try:
        event: schema.WireEvent = _event_decoder.decode(raw)
    except msgspec.ValidationError as error:
        if newer and "Invalid value" in str(error) and "`$[0]`" in str(error):
            return None  # a tag of a newer minor version
        reason = "medium" if "enum value" in str(error) else "field"
        raise RecordRejectedError(reason, str(error)) from None
    except schema.UNREADABLE as error:
        raise RecordRejectedError("msgpack", str(error)) from None
    if isinstance(event, schema.PackedStored):
        return _stored_pages(event)
    if isinstance(event, schema.PackedRemoved):
        hashes = _words("sequence_hashes", event.sequence_hashes)
        return RemovedPages(
            schema.MEDIUM_INDEX[event.medium], hashes, _words("block_hashes", event.block_hashes, len(hashes))
        )
    return event


def _stored_pages(event: schema.PackedStored) -> StoredPages:
    hashes = _words("sequence_hashes", event.sequence_hashes)
    num_pages = len(hashes)
    block_hashes = _words("block_hashes", event.block_hashes, num_pages)
    starts = np.frombuffer(event.chain_starts, np.uint8)
    if len(starts) != (num_pages + 7) // 8:
        raise RecordRejectedError("hash_count", f"chain_starts: {len(starts)} bytes for {num_pages} pages")
    num_chains = int.from_bytes(event.chain_starts, "little").bit_count()
    parents = _words("parents", event.parents, num_chains)
    if num_pages and not starts[0] & 1:
        raise RecordRejectedError("hash_count", "chain_starts: the first page begins no chain")
    if num_pages % 8 and starts[-1] >> (num_pages % 8):
        raise RecordRejectedError("hash_count", f"chain_starts: bits beyond page {num_pages - 1}")
    return StoredPages(schema.MEDIUM_INDEX[event.medium], hashes, block_hashes, starts, parents)


def _words(field: str, data: bytes, expected: int | None = None) -> npt.NDArray[np.uint64]:
    if len(data) % 8 or (expected is not None and len(data) != 8 * expected):
        wanted = "a multiple of 8" if expected is None else f"8 x {expected}"
        raise RecordRejectedError("hash_count", f"{field}: {len(data)} bytes, expected {wanted}")
    return np.frombuffer(data, "<u8")


def _check_totals(batch: schema.EventBatch, steps: list[Step]) -> None:
    pages = sum(len(step.hashes) for step in steps if isinstance(step, StoredPages | RemovedPages))
    if pages > limits.MAX_PAGES_PER_BATCH:
        raise RecordRejectedError("batch_size", f"{pages} pages, at most {limits.MAX_PAGES_PER_BATCH}")
