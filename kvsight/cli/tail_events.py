"""One form for what `kvsight tail` shows: events of the API, and records of a log."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from kv_events.errors import InvalidValueError
from kv_events.http.events import ClientDropped, FeedEvent, StateChanged
from kvsight.cli.moments import local_time
from kvsight.cli.streams import MEDIA
from kvsight.cli.tables import printable

if TYPE_CHECKING:
    from kv_events.records import LogRecord

KINDS = ("stored", "removed", "cleared", "heartbeat", "resync", "state", "dropped", "rejected")


class TailEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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


class Filter(NamedTuple):
    """What to show. None, or an empty set, selects all."""

    worker: str | None
    model: str | None
    tenant: str | None
    media: frozenset[str]
    kinds: frozenset[str]

    @classmethod
    def of(
        cls, worker: str | None, model: str | None, tenant: str | None, media: Iterable[str], kinds: Iterable[str]
    ) -> Filter:
        """Check the options of the command. Raises InvalidValueError."""
        by_name = {tier: medium for medium, tier in MEDIA.items()}
        return cls(
            worker,
            model,
            tenant,
            frozenset(by_name[_one_of("--medium", medium.lower(), by_name)] for medium in media),
            frozenset(_one_of("--kind", kind, KINDS) for kind in kinds),
        )

    def takes(self, event: TailEvent) -> bool:
        """Whether an event is to be shown. Dropped events and rejected records belong to no worker."""
        if self.kinds and not self.kinds & set(event.kinds):
            return False
        if not event.worker:
            return True
        changed = {medium for pages in (event.stored, event.removed) for medium, number in pages.items() if number}
        return (
            self.worker in (None, event.worker)
            and self.model in (None, event.model, event.model.partition("#")[0])
            and self.tenant in (None, event.tenant)
            and (not self.media or bool(self.media & changed))
        )


def of_feed(event: FeedEvent) -> TailEvent:
    """An event of GET /events."""
    now_ms = round(time.time() * 1000)
    if isinstance(event, ClientDropped):
        reason = f"the service dropped {event.lost} events, because this reader was too slow"
        return TailEvent(time_ms=now_ms, kinds=("dropped",), reason=reason)
    if isinstance(event, StateChanged):
        found = TailEvent(time_ms=now_ms, kinds=("state",), before=event.before, reason=event.reason)
    else:
        found = TailEvent(
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


def of_record(record: LogRecord) -> TailEvent:
    """A record of a log. One that cannot be decoded says why."""
    from kv_events.codec import decode_batch
    from kv_events.errors import RecordRejectedError
    from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd

    where = f"partition {record.partition} offset {record.offset}"
    try:
        batch = decode_batch(record.payload)
    except RecordRejectedError as error:
        reason = f"{where}: {error}"
        return TailEvent(time_ms=record.timestamp_ms, kinds=("rejected",), reason=reason)
    stored, removed = batch.pages()
    others = {
        "cleared": any(isinstance(step, AllBlocksCleared) for step in batch.steps),
        "resync": any(isinstance(step, SnapshotBegin | SnapshotEnd) for step in batch.steps),
    }
    return TailEvent(
        time_ms=record.timestamp_ms,
        kinds=_kinds(stored, removed, others),
        model=batch.stream.model,
        tenant=batch.stream.tenant,
        worker=batch.stream.worker,
        dp_rank=batch.stream.dp_rank,
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


def _one_of(option: str, word: str, known: Collection[str]) -> str:
    if word not in known:
        raise InvalidValueError(option, word, f"one of {', '.join(known)}")
    return word
