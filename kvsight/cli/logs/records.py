"""Which records a command takes: a range of the log, and properties of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Self, TypeAlias, TypeVar

import typer

from kv_events.errors import InvalidValueError
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kvsight.cli.logs.lines import KINDS, OF_API, OF_RECORDS, RecordLine, of_batch
from kvsight.cli.shared.console import UsageError
from kvsight.cli.shared.streams import MEDIA

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_events.codec import DecodedBatch
    from kv_events.log.reader import RecordChunk

T = TypeVar("T")

_NAMES_BYTES = 8192
"""The names of a batch are within its first bytes."""
OF_EVENTS = frozenset({int(Channel.EVENTS), int(Channel.DEAD_LETTERS)})
"""Channels with the partitions and offsets of the events' topic."""

From: TypeAlias = Annotated[str | None, typer.Option("--from", help="First moment: a time, index or offsets.")]
To: TypeAlias = Annotated[str | None, typer.Option("--to", help="Last moment, in the same forms.")]
OfChannel: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--channel", help="Only events, control, decisions, reservations or dead_letters. Repeatable."),
]


@dataclass(frozen=True)
class LogRange:
    """Records from one moment up to another one. Of a time, both ends are included; of an index, only the first.

    Offsets are those of the events' topic, so a range of offsets contains only events and dead letters.
    """

    first: LogMoment
    last: LogMoment

    @classmethod
    def of(cls, first: str | None, last: str | None) -> LogRange:
        """Read the options. Raises InvalidValueError, and UsageError for a range that no record can be in."""
        found = cls(LogMoment.parse(first, "--from"), LogMoment.parse(last, "--to"))
        for begin, end in ((found.first.time_s, found.last.time_s), (found.first.index, found.last.index)):
            if begin is not None and end is not None and begin > end:
                raise UsageError(f"--from {first} is after --to {last}")
        return found

    def __str__(self) -> str:
        parts = (("--from", self.first.typed), ("--to", self.last.typed))
        return " ".join(f"{flag} {text}" for flag, text in parts if text) or "everything"

    @property
    def is_bounded(self) -> bool:
        """Whether the range has an end of its own."""
        return bool(self.first.typed or self.last.typed)

    @property
    def has_offsets(self) -> bool:
        """Whether an end of the range is PARTITION:OFFSET,..."""
        return self.first.offsets is not None or self.last.offsets is not None

    def rows(self, chunk: RecordChunk) -> npt.NDArray[np.int64]:
        """Return the rows of a chunk that are in the range."""
        import numpy as np

        from kv_events.kernels.log_records import OFFSET, PARTITION

        first, taken = self.first, chunk.before(self.last)
        if first.index is not None:
            taken[: max(0, first.index - chunk.first_index)] = False
        if first.time_s is not None:
            taken &= chunk.timestamps_ms >= first.time_s * 1000
        if self.has_offsets:
            taken &= np.isin(chunk.channels, list(OF_EVENTS))
        partitions, offsets = chunk.rows[:, PARTITION], chunk.rows[:, OFFSET]
        for partition, offset in (first.offsets or {}).items():
            taken &= (partitions != partition) | (offsets >= offset)
        return np.flatnonzero(taken)


@dataclass(frozen=True, kw_only=True)
class RecordFilter:
    """Which records a command takes. None, or an empty set, selects all."""

    worker: str | None = None
    model: str | None = None
    tenant: str | None = None
    media: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    channels: frozenset[int] = frozenset()
    sequence_hashes: frozenset[int] = frozenset()
    block_hashes: frozenset[int] = frozenset()
    seqs: tuple[int, int] | None = None
    """First and last number."""

    @classmethod
    def parse(
        cls,
        worker: str | None = None,
        model: str | None = None,
        tenant: str | None = None,
        medium: list[str] | None = None,
        kind: list[str] | None = None,
        channel: list[str] | None = None,
        seq: str | None = None,
        *,
        sequence_hash: list[str] | None = None,
        block_hash: list[str] | None = None,
    ) -> Self:
        """Read the flags of these names. Raises InvalidValueError."""
        return cls(
            worker=worker,
            model=model,
            tenant=tenant,
            media=_one_of("--medium", medium, {tier: name for name, tier in MEDIA.items()}),
            kinds=_one_of("--kind", kind, {name: name for name in KINDS}),
            channels=channels_of(channel),
            sequence_hashes=_hashes("--sequence-hash", sequence_hash),
            block_hashes=_hashes("--block-hash", block_hash),
            seqs=_seqs(seq),
        )

    @property
    def is_of_batches(self) -> bool:
        """Whether a record must be decoded to see whether it is taken. Then it must be a batch of events."""
        given = [getattr(self, name) for name in self.__dataclass_fields__ if name != "channels"]
        return any(each not in (None, frozenset()) for each in given)

    def check(self, *, of_records: bool, full: bool = True) -> None:
        """Raise UsageError if a part of the filter can never fit. of_records: of a log; otherwise events of the API.

        full: whether control messages and decisions are shown, too.
        """
        if others := sorted(self.kinds & (OF_API if of_records else OF_RECORDS)):
            source = "the API, without --kafka and --log" if of_records else "records: give --kafka or --log"
            raise UsageError(f"--kind {others[0]} never fits here: only for {source}")
        if self.media and self.kinds and self.kinds <= {"heartbeat", "state"}:
            raise UsageError(f"--kind {min(self.kinds)} never fits --medium: it changes no pages")
        if self.channels and Channel.EVENTS not in self.channels and self.is_of_batches:
            raise UsageError("--channel without events never fits the other filters, which are of events")
        if self.channels and not self.channels & OF_EVENTS and not full:
            raise UsageError("--channel without events and dead_letters needs --full, which prints other records, too")

    def takes(self, line: RecordLine) -> bool:
        """Whether a line is to be shown. Dropped events and rejected records belong to no worker."""
        if self.kinds and not self.kinds & set(line.kinds):
            return False
        if not line.worker:
            return True
        changed = {medium for pages in (line.stored, line.removed) for medium, number in pages.items() if number}
        return (
            self.worker in (None, line.worker)
            and self.model in (None, line.model, line.model.partition("#")[0])
            and self.tenant in (None, line.tenant)
            and (not self.media or bool(self.media & changed))
        )

    def takes_record(self, record: LogRecord) -> bool:
        """Whether a record of a log is taken."""
        from kv_events.codec import batch_or_none

        if self.channels and record.channel not in self.channels:
            return False
        if not self.is_of_batches:
            return True
        if record.channel != Channel.EVENTS or not self._may_take(record.payload):
            return False
        if (batch := batch_or_none(record.payload)) is None:
            return "rejected" in self.kinds
        is_in_seqs = self.seqs is None or self.seqs[0] <= batch.seq <= self.seqs[1]
        return is_in_seqs and self.takes(of_batch(record, batch)) and self._has_hashes(batch)

    def _may_take(self, payload: bytes) -> bool:
        """Look for names and hashes in the bytes, which is faster than decoding them."""
        head = payload[:_NAMES_BYTES]
        names = [name.encode() in head for name in (self.worker, self.model, self.tenant) if name is not None]
        hashes = [
            any(each.to_bytes(8, "little") in payload for each in wanted)
            for wanted in (self.sequence_hashes, self.block_hashes)
            if wanted
        ]
        return all(names) and all(hashes)

    def _has_hashes(self, batch: DecodedBatch) -> bool:
        """Whether one change of a batch is on the media and has the hashes that are asked for."""
        from kv_events.codec import RemovedPages, StoredPages

        if not (self.sequence_hashes or self.block_hashes):
            return True
        return any(
            (not self.media or list(MEDIA)[step.medium] in self.media)
            and (not self.sequence_hashes or not self.sequence_hashes.isdisjoint(step.hashes.tolist()))
            and (not self.block_hashes or not self.block_hashes.isdisjoint(step.block_hashes.tolist()))
            for step in batch.steps
            if isinstance(step, StoredPages | RemovedPages)
        )


@dataclass
class Selection:
    """The records of a log in a range that a filter takes."""

    range: LogRange
    filter: RecordFilter
    num_in_range: int = field(default=0, init=False)
    """Records in the range so far, whatever they are."""

    def __post_init__(self) -> None:
        if self.range.has_offsets and not self.filter.channels <= OF_EVENTS:
            raise UsageError(f"{self.range} names offsets of the events' topic: give times for other channels")

    def records(self, chunk: RecordChunk) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) of the taken records of a chunk."""
        rows = self.range.rows(chunk)
        self.num_in_range += len(rows)
        if len(self.filter.channels) == 1 or self.filter.is_of_batches:
            wanted = next(iter(self.filter.channels), int(Channel.EVENTS))
            rows = rows[chunk.channels[rows] == wanted]
        for row in rows.tolist():
            record = chunk.record(row)
            if self.filter.takes_record(record):
                yield chunk.first_index + row, record


def _one_of(flag: str, names: list[str] | None, known: Mapping[str, T]) -> frozenset[T]:
    """Read a repeatable flag whose values have names. Raises InvalidValueError."""
    for name in names or []:
        if name.lower() not in known:
            raise InvalidValueError(flag, name, f"one of {', '.join(known)}")
    return frozenset(known[name.lower()] for name in names or [])


def channels_of(names: list[str] | None) -> frozenset[int]:
    """Read `--channel`. Raises InvalidValueError."""
    return _one_of("--channel", names, {channel.name.lower(): int(channel) for channel in Channel})


def _hashes(flag: str, texts: list[str] | None) -> frozenset[int]:
    """Read hashes: 64-bit integers, signed or unsigned, decimal or hexadecimal. Raises InvalidValueError."""
    found = set()
    for text in texts or []:
        try:
            value = int(text, 0)
        except ValueError:
            value = 2**64
        if not -(2**63) <= value < 2**64:
            raise InvalidValueError(flag, text, "a 64-bit integer, such as 123 or 0x7b")
        found.add(value % 2**64)
    return frozenset(found)


def _seqs(text: str | None) -> tuple[int, int] | None:
    """Read `--seq`: NUMBER or FIRST-LAST. Raises InvalidValueError."""
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise InvalidValueError("--seq", text, "NUMBER or FIRST-LAST")
    if int(last or first) < int(first):
        raise InvalidValueError("--seq", text, "FIRST before LAST")
    return int(first), int(last or first)
