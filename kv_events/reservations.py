"""Reservations: requests that a service has placed, until they end.

They are records of the topic `kv-reservations`, or of the channel RESERVATIONS of an event log. All records of a
reservation are in one partition, that of its id, so they keep their order. A record of the topic may contain several
of them. The version rule is that of `kv_events.codec`.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, TypeAlias

import msgspec

from kv_events import decisions
from kv_events.decisions import VERSION as VERSION
from kv_events.decisions import Decision, DecisionRecord, Versioned
from kv_events.errors import InvalidValueError, RecordRejectedError
from kv_events.limits import MAX_NAME_BYTES, MAX_OUTPUT_BLOCKS, MAX_REQUEST_ID_BYTES, MAX_TOKENS_PER_REQUEST
from kv_events.records import Channel

PREFILL_COMPLETE, OUTPUT_BLOCK, RELEASED = "prefill_complete", "output_block", "released"
STEPS = (PREFILL_COMPLETE, OUTPUT_BLOCK, RELEASED)
AT_PREFILL = "/prefill"
"""End of the id under which the worker is booked that computes the prompt of a request for another one."""


class Reserved(Versioned, frozen=True, tag=True, array_like=True, gc=False):
    """A request was placed."""

    replica: str
    """The service that placed it: a new name at each start."""
    decision: Decision
    """What was chosen. Its request id is the id of the reservation."""
    prefill_tokens: int
    """Tokens that the worker must compute, those on slower tiers in part."""
    session: str = ""
    """Key of the conversation. Empty: none."""


class Progressed(Versioned, frozen=True, tag=True, array_like=True, gc=False):
    """A placed request went on, or ended."""

    replica: str
    reservation_id: str
    timestamp: float
    """Seconds since 1970, by the clock of the replica."""
    step: str
    """One of PREFILL_COMPLETE, OUTPUT_BLOCK, RELEASED."""
    decay_fraction: float | None = None
    """For an OUTPUT_BLOCK: how much the pages count from now on that only this request has. None: as before."""
    output_blocks: int = 0
    """For an OUTPUT_BLOCK: how many there are, with this one. 0 for the other steps."""


MAX_JOINED = 1024
"""Largest number of records in one of the log."""


class Several(Versioned, frozen=True, tag=True, array_like=True, gc=False):
    """Several records of one replica in one of the log, so that each costs a busy writer and its readers less."""

    records: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_JOINED)]


ReservationRecord: TypeAlias = Reserved | Progressed
"""One record."""

RESERVATIONS_FOLDER = "reservations"
"""Folder inside that of an event log, with the log of the reservations that belong to it."""
CHOICES = (Channel.DECISIONS, Channel.RESERVATIONS)
"""Channels whose records contain decisions."""
FOLDERS_BESIDE = (decisions.DECISIONS_FOLDER, RESERVATIONS_FOLDER)
"""Folders inside that of an event log, with the logs of what services wrote beside it."""

_NAME = "\0"
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ReservationRecord)
_any_decoder = msgspec.msgpack.Decoder()
_several_decoder = msgspec.msgpack.Decoder(Several)
_IS_SEVERAL = _encoder.encode(Several(VERSION, [])).partition(_encoder.encode(VERSION))[0][1:]
_JOINED_OPENING = _encoder.encode(Several(VERSION, []))[:-1] + b"\xdd"
_COUNT_BYTES = 4
_FIRST_AT = len(_JOINED_OPENING) + _COUNT_BYTES


def reservation_id(record: ReservationRecord) -> str:
    return record.decision.request_id if isinstance(record, Reserved) else record.reservation_id


def time_of(record: ReservationRecord) -> float:
    """Return when a record was made, by the clock of its replica, in seconds since 1970."""
    return record.decision.timestamp if isinstance(record, Reserved) else record.timestamp


def encode_reservation(record: ReservationRecord) -> bytes:
    """Encode one record, whose fields were checked (`check_reservation`)."""
    return _encoder.encode(record)


def record_prefixes(replica: str) -> tuple[bytes, ...]:
    """Return what the records that a replica encodes begin with, after the first byte: one for each kind."""
    return tuple(_encoder.encode([kind.__name__, VERSION, replica])[1:] for kind in (Reserved, Progressed))


def record_openings(replica: str) -> tuple[bytes, bytes]:
    """Return what the records of a replica begin with, up to the id: those of choices, and those of steps."""
    decision = Decision(VERSION, _NAME, 0.0, "", "", 0, 0, b"", "", None, None, ())
    records = Reserved(VERSION, replica, decision, 0), Progressed(VERSION, replica, _NAME, 0.0, RELEASED)
    reserved, progressed = (encode_reservation(each).partition(_encoder.encode(_NAME))[0] for each in records)
    return reserved, progressed


def joined(count: int, records: bytes) -> bytes:
    """Return the payload of one record of the log with several. records: encoded, one after the other."""
    return _JOINED_OPENING + count.to_bytes(_COUNT_BYTES) + records


def encoded_id(payload: bytes) -> str:
    """Return the id of a record that this process encoded."""
    _, _, _, subject, *_ = _any_decoder.decode(payload)
    return subject if isinstance(subject, str) else str(subject[2])


def is_by(payload: bytes, prefixes: tuple[bytes, ...]) -> bool:
    """Return whether a replica wrote a record of the log, one or several. prefixes: its `record_prefixes`."""
    return payload.startswith(prefixes, 1 + (_FIRST_AT if payload.startswith(_JOINED_OPENING) else 0))


def singles(payload: bytes) -> Sequence[bytes]:
    """Return the encoded records in a record of the log: itself, if it is one. Broken ones are rejected later."""
    if payload.startswith(_IS_SEVERAL, 1):  # after the length of the array: a later version may add fields
        with suppress(RecordRejectedError):
            return list(map(bytes, decisions.decode_checked(payload, _several_decoder, lambda _: None).records))
    return [payload]


def decode_reservation(payload: bytes) -> ReservationRecord:
    """Decode and check one record. Raises RecordRejectedError."""
    record: ReservationRecord = decisions.decode_checked(payload, _decoder, check_reservation)
    return record


def decode_record(channel: int, payload: bytes) -> DecisionRecord | ReservationRecord:
    """Decode and check a record of a channel, which is one of CHOICES. Raises RecordRejectedError."""
    return decode_reservation(payload) if channel == Channel.RESERVATIONS else decisions.decode_decision(payload)


def decode_choice(channel: int, payload: bytes) -> DecisionRecord | None:
    """Decode what a record says about a choice: a decision, which may be that of a reservation, or an outcome.

    channel: one of CHOICES. None: it says how a reservation went on. Raises RecordRejectedError.
    """
    record = decode_record(channel, payload)
    if isinstance(record, Reserved):
        return record.decision
    return None if isinstance(record, Progressed) else record


def check_reservation(record: ReservationRecord) -> None:
    """Check every size. Raises InvalidValueError naming the field."""
    decisions.check_text("replica", record.replica, MAX_NAME_BYTES)
    if isinstance(record, Reserved):
        decisions.check_decision(record.decision)
        decisions.check_number("prefill_tokens", record.prefill_tokens, MAX_TOKENS_PER_REQUEST)
        if len(record.session.encode()) > MAX_REQUEST_ID_BYTES:
            raise InvalidValueError("session", record.session, f"a text of at most {MAX_REQUEST_ID_BYTES} bytes")
        return
    decisions.check_text("reservation_id", record.reservation_id, MAX_REQUEST_ID_BYTES)
    if not (math.isfinite(record.timestamp) and record.timestamp >= 0):
        raise InvalidValueError("timestamp", record.timestamp, "seconds since 1970")
    if record.step not in STEPS:
        raise InvalidValueError("step", record.step, f"one of {', '.join(STEPS)}")
    least = 1 if record.step == OUTPUT_BLOCK else 0
    if not least <= record.output_blocks <= MAX_OUTPUT_BLOCKS:
        expected = f"an integer in {least} .. {MAX_OUTPUT_BLOCKS}"
        raise InvalidValueError("output_blocks", record.output_blocks, expected)
    if record.decay_fraction is not None and not 0 <= record.decay_fraction <= 1:
        raise InvalidValueError("decay_fraction", record.decay_fraction, "a number in 0 .. 1")
