"""Decisions of routers, and their outcomes: what a router chose for a request, and what the engine really reused.

Both are records of the topic `kv-decisions`, or of the channel DECISIONS of an event log. A decision and its outcome
have the same request id, which is also the key of both records. The version rule is that of `kv_events.codec`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from kv_events import limits
from kv_events.errors import InvalidValueError, RecordRejectedError
from kv_events.schema import SCHEMA_MAJOR, SCHEMA_VERSION, decoded


class Versioned(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record that begins with the version of its schema."""

    schema_version: int
    """major << 8 | minor, see `kv_events.schema`."""


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker that a router could have chosen, as the router saw it."""

    worker: str
    dp_rank: int | None
    """The rank that would have been chosen. None: any."""
    tokens: int
    """Tokens of the prompt that the worker held, according to the router."""
    score: float
    """The number by which the router compared the candidates. The highest one wins."""


class Decision(Versioned, frozen=True, tag=True, array_like=True, gc=False):
    """What a router chose for one request."""

    request_id: str
    timestamp: float
    """Time of the choice, by the router's clock, in seconds since 1970."""
    model: str
    tenant: str
    block_size: int
    """Tokens a page of `sequence_hashes`. 0: no worker of the model was known, so there are none."""
    prompt_tokens: int
    sequence_hashes: bytes
    """n x u64, little-endian: the complete pages of the prompt, at most the first `MAX_PAGES_PER_DECISION`."""
    worker: str
    dp_rank: int | None
    """The rank that was chosen. None: any."""
    predicted_tokens: int | None
    """Tokens that the router expected the worker to reuse. None: the router did not ask an index."""
    candidates: tuple[Candidate, ...]
    """The workers among which the router chose. May be empty."""


class Outcome(Versioned, frozen=True, tag=True, array_like=True, gc=False):
    """What the engine reused for a request."""

    request_id: str
    timestamp: float
    """Time at which the engine had read its cache, by the router's clock: at the latest that of its answer."""
    cached_tokens: int
    """Tokens of the prompt that the engine found in its cache: `usage.prompt_tokens_details.cached_tokens`."""


DecisionRecord: TypeAlias = Decision | Outcome
"""One record."""


class Choices(NamedTuple):
    """Choices that a service made at once, as far as they are counted."""

    timestamp: float
    sums: tuple[int, int, int, int]
    """Requests, tokens of their prompts, those of them that the best candidates held, and that the chosen ones did."""
    lost: Sequence[tuple[str, int, int, int]]
    """For each worker that was chosen though others held more: requests, tokens, and the number of the last choice."""
    records: bytes
    """The reservations of the choices, encoded, one after the other."""
    ends: Sequence[int]
    """Where the record of each choice ends."""
    name_at: int
    """Where each record has the name of its reservation: its size is the byte before."""

    def record(self, number: int) -> bytes:
        """Return the record of a choice."""
        return self.records[self.ends[number - 1] if number else 0 : self.ends[number]]

    def name(self, number: int) -> str:
        """Return the name of the reservation of a choice."""
        at = self.name_at + (self.ends[number - 1] if number else 0)
        return self.records[at : at + self.records[at - 1]].decode()


VERSION = SCHEMA_VERSION
DECISIONS_FOLDER = "decisions"
"""Folder inside that of an event log, with the log of the decisions that belong to it."""


_Record = TypeVar("_Record", bound=Versioned)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(DecisionRecord)


def encode_decision(record: DecisionRecord) -> bytes:
    """Encode one record. Raises InvalidValueError naming the field that breaks a limit."""
    check_decision(record)
    return _encoder.encode(record)


def decode_decision(payload: bytes) -> DecisionRecord:
    """Decode and check one record. Raises RecordRejectedError."""
    record: DecisionRecord = decode_checked(payload, _decoder, check_decision)
    return record


def decode_checked(
    payload: bytes, decoder: msgspec.msgpack.Decoder[_Record], check: Callable[[_Record], None]
) -> _Record:
    """Decode one record that begins with its schema version. check: raises InvalidValueError.

    Raises RecordRejectedError.
    """
    if not 0 < len(payload) <= limits.MAX_RECORD_BYTES:
        raise RecordRejectedError("record_size", f"{len(payload)} bytes, expected 1 .. {limits.MAX_RECORD_BYTES}")
    record = decoded(payload, decoder)
    if record.schema_version >> 8 != SCHEMA_MAJOR:
        detail = f"major {record.schema_version >> 8}, this decoder reads {SCHEMA_MAJOR}"
        raise RecordRejectedError("schema_version", detail)
    try:
        check(record)
    except InvalidValueError as error:
        raise RecordRejectedError("field", str(error)) from None
    return record


def check_decision(record: DecisionRecord) -> None:
    """Check every size. Raises InvalidValueError naming the field."""
    check_text("request_id", record.request_id, limits.MAX_REQUEST_ID_BYTES)
    if not (math.isfinite(record.timestamp) and record.timestamp >= 0):
        raise InvalidValueError("timestamp", record.timestamp, "seconds since 1970")
    if isinstance(record, Outcome):
        check_number("cached_tokens", record.cached_tokens, limits.MAX_TOKENS_PER_REQUEST)
        return
    for field in ("model", "tenant", "worker"):
        check_text(field, getattr(record, field), limits.MAX_NAME_BYTES)
    check_number("block_size", record.block_size, limits.MAX_BLOCK_SIZE)
    check_number("prompt_tokens", record.prompt_tokens, limits.MAX_TOKENS_PER_REQUEST)
    _check_held("", record.dp_rank, record.predicted_tokens)
    if len(record.sequence_hashes) % 8 or len(record.sequence_hashes) > 8 * limits.MAX_PAGES_PER_DECISION:
        expected = f"a multiple of 8, at most 8 x {limits.MAX_PAGES_PER_DECISION}"
        raise InvalidValueError("len(sequence_hashes)", len(record.sequence_hashes), expected)
    if len(record.candidates) > limits.MAX_CANDIDATES:
        raise InvalidValueError("len(candidates)", len(record.candidates), f"at most {limits.MAX_CANDIDATES}")
    for number, candidate in enumerate(record.candidates):
        prefix = f"candidates[{number}]."
        check_text(f"{prefix}worker", candidate.worker, limits.MAX_NAME_BYTES)
        _check_held(prefix, candidate.dp_rank, candidate.tokens)
        if math.isnan(candidate.score):
            raise InvalidValueError(f"{prefix}score", candidate.score, "a number")


def _check_held(prefix: str, dp_rank: int | None, tokens: int | None) -> None:
    if dp_rank is not None:
        check_number(f"{prefix}dp_rank", dp_rank, limits.MAX_DP_RANK)
    if tokens is not None:
        check_number(f"{prefix}tokens" if prefix else "predicted_tokens", tokens, limits.MAX_TOKENS_PER_REQUEST)


def check_text(field: str, text: str, most: int) -> None:
    """Check the size of a text in bytes. Raises InvalidValueError."""
    if not 0 < len(text.encode()) <= most:
        raise InvalidValueError(field, text, f"a text of 1 .. {most} bytes")


def check_number(field: str, number: int, most: int) -> None:
    """Check that a number is in 0 .. most. Raises InvalidValueError."""
    if not 0 <= number <= most:
        raise InvalidValueError(field, number, f"an integer in 0 .. {most}")
