"""Which records a command takes: a range of the log, and properties of batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kv_events.errors import InvalidValueError, RecordRejectedError
from kv_events.records import Channel
from kvsight.cli.console import UsageError
from kvsight.cli.moments import parse_moment
from kvsight.cli.streams import MEDIA

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_events.codec import DecodedBatch
    from kv_events.log.moments import LogMoment
    from kv_events.log.reader import RecordChunk
    from kv_events.records import LogRecord

_NAMES_BYTES = 8192
"""The names of a batch are within its first bytes."""
_OF_EVENTS = (int(Channel.EVENTS), int(Channel.DEAD_LETTERS))
"""Channels with the partitions and offsets of the events' topic."""

From: TypeAlias = Annotated[str | None, typer.Option("--from", help="First moment: a time, index or offsets.")]
To: TypeAlias = Annotated[str | None, typer.Option("--to", help="Last moment, in the same forms.")]
OfWorker: TypeAlias = Annotated[str | None, typer.Option("--worker", help="Only batches of this worker.")]
OfModel: TypeAlias = Annotated[str | None, typer.Option("--model", help="Only batches of this model.")]
OfChannel: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--channel", help="Only this channel. Repeatable."),
]


@dataclass(frozen=True)
class Range:
    """Records from one moment up to another one. Of a time, both ends are included; of an index, only the first.

    Offsets are those of the events' topic, so a range of offsets contains only events and dead letters.
    """

    first: LogMoment
    last: LogMoment

    @classmethod
    def of(cls, first: str | None, last: str | None) -> Range:
        """Read the options. Raises UsageError."""
        return cls(parse_moment(first, "--from"), parse_moment(last, "--to"))

    def __str__(self) -> str:
        parts = (("--from", self.first.typed), ("--to", self.last.typed))
        return " ".join(f"{flag} {text}" for flag, text in parts if text) or "everything"

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
            taken &= np.isin(chunk.channels, _OF_EVENTS)
        partitions, offsets = chunk.rows[:, PARTITION], chunk.rows[:, OFFSET]
        for partition, offset in (first.offsets or {}).items():
            taken &= (partitions != partition) | (offsets >= offset)
        return np.flatnonzero(taken)


@dataclass
class Selection:
    """The records that a command takes. Filters of batches leave out all records that are not batches of events."""

    range: Range
    channels: frozenset[int] = frozenset()
    """Empty: all."""
    worker: str | None = None
    model: str | None = None
    media: frozenset[int] = frozenset()
    sequence_hashes: frozenset[int] = frozenset()
    block_hashes: frozenset[int] = frozenset()
    seqs: tuple[int, int] | None = None
    """First and last number."""
    num_in_range: int = field(default=0, init=False)
    """Records in the range so far, whatever they are."""

    def __post_init__(self) -> None:
        if self.range.has_offsets and not self.channels <= set(_OF_EVENTS):
            raise UsageError(f"{self.range} names offsets of the events' topic: give times for other channels")

    @property
    def is_of_batches(self) -> bool:
        """Whether a record must be decoded to see whether it is taken."""
        given = (self.worker, self.model, self.seqs, self.media, self.sequence_hashes, self.block_hashes)
        return any(each not in (None, frozenset()) for each in given)

    def records(self, chunk: RecordChunk) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) of the taken records of a chunk."""
        rows = self.range.rows(chunk)
        self.num_in_range += len(rows)
        if len(self.channels) == 1 or self.is_of_batches:
            wanted = next(iter(self.channels)) if self.channels else int(Channel.EVENTS)
            rows = rows[chunk.channels[rows] == wanted]
        for row in rows.tolist():
            record = chunk.record(row)
            is_of_channel = not self.channels or record.channel in self.channels
            if is_of_channel and (not self.is_of_batches or self._takes(record)):
                yield chunk.first_index + row, record

    def _takes(self, record: LogRecord) -> bool:
        from kv_events.codec import decode_batch

        if record.channel != Channel.EVENTS or not self._may_take(record.payload):
            return False
        try:
            return self._takes_batch(decode_batch(record.payload))
        except RecordRejectedError:
            return False

    def _may_take(self, payload: bytes) -> bool:
        """Look for names and hashes in the bytes, which is faster than decoding them."""
        head = payload[:_NAMES_BYTES]
        names = [name.encode() in head for name in (self.worker, self.model) if name is not None]
        hashes = [
            any(each.to_bytes(8, "little") in payload for each in wanted)
            for wanted in (self.sequence_hashes, self.block_hashes)
            if wanted
        ]
        return all(names) and all(hashes)

    def _takes_batch(self, batch: DecodedBatch) -> bool:
        from kv_events.codec import RemovedPages, StoredPages
        from kv_events.streams import split_group

        stream = batch.stream
        model, _ = split_group(stream.model)
        if self.worker not in (None, stream.worker) or self.model not in (None, model, stream.model):
            return False
        if self.seqs is not None and not self.seqs[0] <= batch.seq <= self.seqs[1]:
            return False
        if not (self.media or self.sequence_hashes or self.block_hashes):
            return True
        changes = [step for step in batch.steps if isinstance(step, StoredPages | RemovedPages)]
        return any(
            (not self.media or step.medium in self.media)
            and (not self.sequence_hashes or not self.sequence_hashes.isdisjoint(step.hashes.tolist()))
            and (not self.block_hashes or not self.block_hashes.isdisjoint(step.block_hashes.tolist()))
            for step in changes
        )


def channels_of(names: list[str] | None) -> frozenset[int]:
    """Read `--channel`. Raises InvalidValueError."""
    known = {channel.name.lower(): int(channel) for channel in Channel}
    for name in names or []:
        if name.lower() not in known:
            raise InvalidValueError("--channel", name, f"one of {', '.join(known)}")
    return frozenset(known[name.lower()] for name in names or [])


def media_of(names: list[str] | None) -> frozenset[int]:
    """Read `--medium`: gpu, cpu, disk or external. Raises InvalidValueError."""
    known = {tier: number for number, tier in enumerate(MEDIA.values())}
    for name in names or []:
        if name.lower() not in known:
            raise InvalidValueError("--medium", name, f"one of {', '.join(known)}")
    return frozenset(known[name.lower()] for name in names or [])


def hashes_of(flag: str, texts: list[str] | None) -> frozenset[int]:
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


def seqs_of(text: str | None) -> tuple[int, int] | None:
    """Read `--seq`: NUMBER or FIRST-LAST. Raises InvalidValueError."""
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise InvalidValueError("--seq", text, "NUMBER or FIRST-LAST")
    return int(first), int(last or first)
