"""`kvsight log info`"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kv_events.errors import RecordRejectedError
from kv_events.records import Channel
from kvsight.cli.console import out, print_json, print_lines
from kvsight.cli.log.reading import LogFolder, LogInput
from kvsight.cli.log.verify import damage_facts
from kvsight.cli.moments import local_time
from kvsight.cli.options import AsJson
from kvsight.cli.tables import Column, count, natural_order, table_lines

if TYPE_CHECKING:
    from kv_events.codec import DecodedBatch
    from kv_events.records import LogRecord

_MB = 1_000_000


@dataclass
class _Stream:
    """What a log has of one worker stream."""

    model: str
    tenant: str
    worker: str
    dp_rank: int
    block_size: int
    first_ms: int
    last_ms: int
    records: int = 0
    epochs: int = 0
    pages_stored: int = 0
    pages_removed: int = 0
    _epochs: set[int] = field(default_factory=set)

    def note(self, record: LogRecord, batch: DecodedBatch) -> None:
        self.records += 1
        self._epochs.add(batch.epoch)
        self.epochs = len(self._epochs)
        self.first_ms, self.last_ms = min(self.first_ms, record.timestamp_ms), max(self.last_ms, record.timestamp_ms)
        pages = batch.pages()
        self.pages_stored += pages.stored.total()
        self.pages_removed += pages.removed.total()

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "_epochs"}


@dataclass
class _Contents:
    """What a log has."""

    streams: dict[tuple[Any, ...], _Stream] = field(default_factory=dict)
    channels: Counter[int] = field(default_factory=Counter)
    rejected: int = 0

    def note(self, record: LogRecord) -> None:
        from kv_events.codec import decode_batch

        self.channels[record.channel] += 1
        if record.channel != Channel.EVENTS:
            return
        try:
            batch = decode_batch(record.payload)
        except RecordRejectedError:
            self.rejected += 1
            return
        stream = self.streams.get(batch.stream)
        if stream is None:
            times = (record.timestamp_ms, record.timestamp_ms)
            stream = self.streams[batch.stream] = _Stream(*batch.stream, batch.block_size, *times)
        stream.note(record, batch)


def info(log: LogFolder, as_json: AsJson = False) -> None:
    """Show what a log has: its span, size, channels, worker streams, pages and damage.

    Example: kvsight log info run.log
    """
    source, contents = LogInput(log), _Contents()
    for _, record in source.records("reading"):
        contents.note(record)
    if as_json:
        print_json(_facts(source, contents))
    else:
        print_lines(_lines(source, contents))
    source.exit_if_damaged()


def _facts(source: LogInput, contents: _Contents) -> dict[str, Any]:
    extent = source.extent
    return {
        "records": extent.num_records,
        "first_index": extent.first_index,
        "next_index": extent.next_index,
        "first_ms": extent.first_ms,
        "last_ms": extent.last_ms,
        "bytes": source.num_bytes,
        "key_frames": _num_frames(source),
        "channels": {_channel(number): records for number, records in sorted(contents.channels.items())},
        "rejected": contents.rejected,
        "streams": [stream.facts() for stream in contents.streams.values()],
        **damage_facts(source),
    }


def _lines(source: LogInput, contents: _Contents) -> Iterator[str]:
    extent = source.extent
    if not extent.num_records:
        yield f"{source.folder}: the log is empty"
        return
    yield f"{source.folder}: records {extent.first_index} to {extent.next_index - 1}, {source.num_bytes / _MB:.1f} MB"
    yield f"from {local_time(extent.first_ms / 1000)} to {local_time(extent.last_ms / 1000)}"
    named = ", ".join(f"{records} {_channel(number)}" for number, records in sorted(contents.channels.items()))
    yield f"{count(extent.num_records, 'record')}: {named}; {count(_num_frames(source), 'key frame')}"
    if contents.rejected:
        yield f"{count(contents.rejected, 'record')} of events cannot be decoded"
    streams = sorted(contents.streams.values(), key=lambda each: (each.model, each.tenant, natural_order(each.worker)))
    if streams:
        yield ""
        yield from table_lines(list(_columns(streams)), out.width)


def _columns(streams: list[_Stream]) -> Iterator[Column]:
    yield Column("worker", [each.worker for each in streams])
    yield Column("rank", [str(each.dp_rank) for each in streams], is_number=True, rank=2)
    yield Column("model", [each.model for each in streams], rank=4)
    if any(each.tenant != "default" for each in streams):
        yield Column("tenant", [each.tenant for each in streams], rank=3)
    yield Column("block size", [str(each.block_size) for each in streams], is_number=True, rank=5)
    yield Column("records", [str(each.records) for each in streams], is_number=True)
    yield Column("epochs", [str(each.epochs) for each in streams], is_number=True, rank=1)
    yield Column("stored", [str(each.pages_stored) for each in streams], is_number=True)
    yield Column("removed", [str(each.pages_removed) for each in streams], is_number=True)


def _num_frames(source: LogInput) -> int:
    return sum(1 for _ in source.folder.glob("*.kvframe"))


def _channel(number: int) -> str:
    return Channel(number).name.lower() if number in list(Channel) else f"channel {number}"
