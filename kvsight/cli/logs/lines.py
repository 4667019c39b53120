"""The forms of a record for people and programs: a line, a short JSON object, and one with everything in it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from kv_events.errors import RecordRejectedError
from kv_events.http.events import ClientDropped, FeedEvent, StateChanged
from kv_events.records import Channel, LogRecord
from kv_events.runtime.words import count, local_time, printable
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd
from kvsight.cli.shared.streams import MEDIA

if TYPE_CHECKING:
    from kv_events.codec import DecodedBatch, Step
    from kv_events.decisions import DecisionRecord
    from kv_events.reservations import ReservationRecord

_TIERS = tuple(MEDIA.values())
_OTHER_EVENTS = {"AllBlocksCleared": "cleared", "SnapshotBegin": "resync_begin", "SnapshotEnd": "resync_end"}
KINDS = ("stored", "removed", "cleared", "heartbeat", "resync", "state", "dropped", "rejected")
OF_API, OF_RECORDS = frozenset({"state", "dropped"}), frozenset({"resync", "rejected"})
"""Kinds that only the API, or only records have."""


class RecordLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One batch, or one change of a state. Fields that do not apply are left out of its JSON."""

    time_ms: int
    """Milliseconds since 1970: when the record was written, or when the event of the API was received."""
    kinds: tuple[str, ...]
    """Words of `KINDS`: a batch may store and remove pages."""
    model: str = ""
    tenant: str = ""
    worker: str = ""
    dp_rank: int | None = None
    epoch: int | None = None
    seq: int | None = None
    stored: dict[str, int] = {}
    """Medium -> pages."""
    removed: dict[str, int] = {}
    state: str = ""
    """State of the view after the event."""
    before: str | None = None
    reason: str = ""
    partition: int | None = None
    offset: int | None = None

    def line(self) -> str:
        """The event for people."""
        shown = local_time(self.time_ms / 1000)
        when = shown if shown.startswith("@") else shown[11:23]
        return f"{when}  {printable(self._subject())}{printable(self._text())}"

    def _subject(self) -> str:
        if not self.worker:
            return ""
        of_tenant = "" if self.tenant == "default" else f" ({self.tenant})"
        return f"{self.worker} rank {self.dp_rank}  {self.model}{of_tenant}  "

    def _text(self) -> str:
        if "dropped" in self.kinds or "rejected" in self.kinds:
            return self.reason
        because = f" ({self.reason})" if self.reason else ""
        if "state" in self.kinds:
            return f"{self.before or 'unknown'} -> {self.state}{because}"
        changes = [
            f"{verb} {_by_tier(pages)}"
            for verb, pages in (("stored", self.stored), ("removed", self.removed))
            if any(pages.values())
        ]
        words = [kind for kind in self.kinds if kind not in ("stored", "removed")]
        state = f"  {self.state}" if self.state else ""
        return f"seq {self.seq}: {', '.join([*words, *changes])}{state}{because}"


def of_feed(event: FeedEvent) -> RecordLine:
    """An event of GET /events."""
    now_ms = round(time.time() * 1000)
    if isinstance(event, ClientDropped):
        reason = f"the service dropped {count(event.lost, 'event')}, because this reader was too slow"
        return RecordLine(time_ms=now_ms, kinds=("dropped",), reason=reason)
    if isinstance(event, StateChanged):
        found = RecordLine(time_ms=now_ms, kinds=("state",), before=event.before, reason=event.reason)
    else:
        found = RecordLine(
            time_ms=now_ms,
            kinds=_kinds(event.stored, event.removed, {"cleared": event.cleared}),
            epoch=event.epoch,
            seq=event.seq,
            stored=event.stored,
            removed=event.removed,
        )
    return replace(
        found,
        model=event.model_name,
        tenant=event.routing_group,
        worker=event.instance_id,
        dp_rank=event.dp_rank,
        state=event.state,
    )


def of_record(record: LogRecord) -> RecordLine:
    """A record of a log. One that cannot be decoded says why."""
    from kv_events.codec import decode_batch

    where = f"partition {record.partition} offset {record.offset}"
    try:
        return of_batch(record, decode_batch(record.payload))
    except RecordRejectedError as error:
        return RecordLine(time_ms=record.timestamp_ms, kinds=("rejected",), reason=f"{where}: {error}")


def of_batch(record: LogRecord, batch: DecodedBatch) -> RecordLine:
    """A record of a log, which holds this batch."""
    stored, removed = batch.pages()
    others = {
        "cleared": any(isinstance(step, AllBlocksCleared) for step in batch.steps),
        "resync": any(isinstance(step, SnapshotBegin | SnapshotEnd) for step in batch.steps),
    }
    return RecordLine(
        time_ms=record.timestamp_ms,
        kinds=_kinds(stored, removed, others),
        **batch.stream._asdict(),
        epoch=batch.epoch,
        seq=batch.seq,
        stored=stored,
        removed=removed,
        reason=batch.degraded_reason,
        partition=record.partition,
        offset=record.offset,
    )


def _kinds(stored: Mapping[str, int], removed: Mapping[str, int], others: Mapping[str, bool]) -> tuple[str, ...]:
    """The kinds of a batch. One that changes nothing is a heartbeat."""
    has = {**others, "stored": any(stored.values()), "removed": any(removed.values())}
    return tuple(kind for kind in KINDS if has.get(kind)) or ("heartbeat",)


def _by_tier(pages: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {MEDIA.get(medium, medium)}" for medium, number in pages.items() if number)


def full_records(index: int, record: LogRecord) -> Iterator[dict[str, Any]]:
    """Yield a record as a JSON object, or each of the records that it contains.

    One that cannot be decoded has `rejected`, with the reason.
    """
    from kv_events.reservations import singles

    for payload in singles(record.payload):
        yield _full_record(index, record._replace(payload=payload))


def _full_record(index: int, record: LogRecord) -> dict[str, Any]:
    known = record.channel in list(Channel)
    found: dict[str, Any] = {
        "index": index,
        "channel": Channel(record.channel).name.lower() if known else record.channel,
        "partition": record.partition,
        "offset": record.offset,
        "time_ms": record.timestamp_ms,
        "key": record.key.decode(errors="replace"),
        "bytes": len(record.payload),
    }
    try:
        return found | _contents(record)
    except RecordRejectedError as error:
        return found | {"rejected": str(error)}


def _contents(record: LogRecord) -> dict[str, Any]:
    from kv_events.codec import decode_batch, decode_resync
    from kv_events.decisions import decode_decision
    from kv_events.reservations import decode_reservation

    match record.channel:
        case Channel.EVENTS | Channel.DEAD_LETTERS:
            batch = decode_batch(record.payload)
            return {
                **batch.stream._asdict(),
                "block_size": batch.block_size,
                "epoch": batch.epoch,
                "seq": batch.seq,
                "degraded_reason": batch.degraded_reason,
                "events": [_event(step) for step in batch.steps],
            }
        case Channel.CONTROL:
            return msgspec.structs.asdict(decode_resync(record.payload))
        case Channel.DECISIONS:
            return _choice(decode_decision(record.payload))
        case Channel.RESERVATIONS:
            reserved = _choice(decode_reservation(record.payload))
            decision = reserved.pop("decision", None)
            return reserved if decision is None else {**_choice(decision), **reserved}
    return {}


def _choice(found: DecisionRecord | ReservationRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": type(found).__name__.lower(), **msgspec.structs.asdict(found)}
    if "sequence_hashes" in fields:
        fields["sequence_hashes"] = memoryview(fields["sequence_hashes"]).cast("Q").tolist()
    return fields


def _event(step: Step) -> dict[str, Any]:
    from kv_events.codec import RemovedPages, StoredPages

    if isinstance(step, RemovedPages):
        pages = {"sequence_hashes": step.hashes.tolist(), "block_hashes": step.block_hashes.tolist()}
        return {"type": "removed", "medium": _TIERS[step.medium], **pages}
    if isinstance(step, StoredPages):
        import numpy as np

        starts = np.flatnonzero(np.unpackbits(step.chain_starts, bitorder="little")).tolist()
        pages = {"sequence_hashes": step.hashes.tolist(), "block_hashes": step.block_hashes.tolist()}
        chains = [{"start": s, "parent": p} for s, p in zip(starts, step.parents.tolist(), strict=True)]
        return {"type": "stored", "medium": _TIERS[step.medium], "chains": chains, **pages}
    return {"type": _OTHER_EVENTS[type(step).__name__], **msgspec.structs.asdict(step)}
