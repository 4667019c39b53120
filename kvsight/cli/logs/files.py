"""`kvsight log`: info, slice, merge, export."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from kv_events.log.event_log import EventLogWriter
from kv_events.log.format import LOCK_NAME, list_segments
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.runtime.words import count, local_time, natural_order
from kvsight.cli.logs.reading import LogFolder, LogInput, check_new_log, damage_facts, exit_if_any_damaged, moment_fault
from kvsight.cli.logs.records import From, LogRange, OfChannel, RecordFilter, Selection, To
from kvsight.cli.shared.console import UsageError, err, out, print_json, print_result, progress_bar
from kvsight.cli.shared.flags import AsJson
from kvsight.cli.shared.process import load_kernels
from kvsight.cli.shared.tables import Column, table_lines
from kvsight.extras import require

if TYPE_CHECKING:
    from kv_events.codec import DecodedBatch

_MB = 1_000_000
_MOST_REMEMBERED = 65_536

NewLog = Annotated[Path, typer.Argument(help="Folder of the new log: a new or an empty one.")]


# --- info -----------------------------------------------------------------------------------------------------------


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
    epochs: set[int] = field(default_factory=set)
    pages_stored: int = 0
    pages_removed: int = 0

    def note(self, record: LogRecord, batch: DecodedBatch) -> None:
        self.records += 1
        self.epochs.add(batch.epoch)
        self.first_ms, self.last_ms = min(self.first_ms, record.timestamp_ms), max(self.last_ms, record.timestamp_ms)
        pages = batch.pages()
        self.pages_stored += pages.stored.total()
        self.pages_removed += pages.removed.total()


@dataclass
class _Contents:
    """What a log has."""

    streams: dict[tuple[Any, ...], _Stream] = field(default_factory=dict)
    channels: Counter[int] = field(default_factory=Counter)
    rejected: int = 0

    def note(self, record: LogRecord) -> None:
        from kv_events.codec import batch_or_none

        self.channels[record.channel] += 1
        if record.channel != Channel.EVENTS:
            return
        if (batch := batch_or_none(record.payload)) is None:
            self.rejected += 1
            return
        stream = self.streams.get(batch.stream)
        if stream is None:
            times = (record.timestamp_ms, record.timestamp_ms)
            stream = self.streams[batch.stream] = _Stream(*batch.stream, batch.block_size, *times)
        stream.note(record, batch)


def info(
    log: LogFolder,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the span, size, streams, pages and damage of a log.

    --verify checks every byte: checksums, missing segments, a torn tail, key frames and the time index. Damage is
    listed on stderr with segment, byte and record, and the exit code is 1.

    Example: kvsight log info run.log
    """
    source = LogInput(log)
    if verify:
        _verify(source, as_json)
    else:
        contents = _Contents()
        for _, record in source.records("reading"):
            contents.note(record)
        print_result(_facts(source, contents), _lines(source, contents), as_json=as_json)
    source.exit_if_damaged()


def _verify(source: LogInput, as_json: bool) -> None:
    """Read every byte, and print what is sound. Damage is noted in the log."""
    from kv_events.log.time_index import faults_of_times

    began = time.perf_counter()
    for _ in source.chunks("checking"):
        pass
    seconds = time.perf_counter() - began
    source.faults += faults_of_times(source.folder)
    if any(source.folder.glob("*.kvframe")):
        from indexer.replay.frames import faults_of_frames

        source.faults += faults_of_frames(source.folder)
    size, sound = source.num_bytes / _MB, count(source.extent.num_records, "sound record")
    facts = {
        "records": source.extent.num_records,
        "bytes": source.num_bytes,
        "first_index": source.extent.first_index,
        "next_index": source.extent.next_index,
        **damage_facts(source),
    }
    line = f"{source.folder}: {sound}, {size:.1f} MB checked at {size / max(seconds, 1e-9):.0f} MB/s"
    print_result(facts, [line], as_json=as_json)


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
        "streams": [asdict(stream) | {"epochs": len(stream.epochs)} for stream in contents.streams.values()],
        **damage_facts(source),
    }


def _lines(source: LogInput, contents: _Contents) -> Iterator[str]:
    extent = source.extent
    if not extent.num_records:
        if not source.damage_lines:
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
        yield from table_lines(_columns(streams), out.width)


def _columns(streams: list[_Stream]) -> Iterator[Column]:
    yield Column("worker", [each.worker for each in streams])
    yield Column("rank", [each.dp_rank for each in streams], rank=2)
    yield Column("model", [each.model for each in streams], rank=4)
    if any(each.tenant != "default" for each in streams):
        yield Column("tenant", [each.tenant for each in streams], rank=3)
    yield Column("block size", [each.block_size for each in streams], rank=5)
    yield Column("records", [each.records for each in streams])
    yield Column("epochs", [len(each.epochs) for each in streams], rank=1)
    yield Column("stored", [each.pages_stored for each in streams])
    yield Column("removed", [each.pages_removed for each in streams])


def _num_frames(source: LogInput) -> int:
    return sum(1 for _ in source.folder.glob("*.kvframe"))


def _channel(number: int) -> str:
    return Channel(number).name.lower() if number in list(Channel) else f"channel {number}"


# --- slice and merge ------------------------------------------------------------------------------------------------


def slice_log(
    log: LogFolder,
    new_log: NewLog,
    first: From = None,
    last: To = None,
    worker: Annotated[str | None, typer.Option(help="Only batches of this worker.")] = None,
    model: Annotated[str | None, typer.Option(help="Only batches of this model.")] = None,
    channel: OfChannel = None,
    as_json: AsJson = False,
) -> None:
    """Copy a part of a log into a new one.

    --from and --to accept the same forms as `kvsight replay --at`. Records keep their partition, offset and time; their
    indices begin at 0. A slice of all workers that begins later than its log, at a time or an index, gets a key frame
    with the views at its beginning, so that any moment can be replayed as from the whole log. Offsets are those of the
    events' topic: a slice by offsets has events and dead letters only, and no key frame.

    Example: kvsight log slice run.log noon.log --from 2026-01-31T12:00:00Z --to 2026-01-31T12:10:00Z
    """
    source = LogInput(log)
    selection = Selection(LogRange.of(first, last), RecordFilter.parse(worker, model, channel=channel))
    begin: int | None = None
    check_new_log(new_log)
    with EventLogWriter(new_log) as writer:
        for chunk in source.chunks("copying"):
            for index, record in selection.records(chunk):
                begin = index if begin is None else begin
                writer.append(record)
    if not selection.num_in_range and (first or last):
        _remove(new_log)
        source.fail_outside(str(selection.range))
    if begin is None and (worker or model):
        _remove(new_log)
        given = " ".join(f"--{name} {value}" for name, value in (("worker", worker), ("model", model)) if value)
        raise UsageError(f"{log}: no record matches {given}")
    if begin is not None and begin > source.extent.first_index and not (worker or model or channel):
        _keep_views(log, new_log, selection.range, begin)
    _report_new(new_log, writer.next_index, [source], as_json)


def _keep_views(log: Path, new_log: Path, copied: LogRange, begin: int) -> None:
    from indexer.replay import Timeline
    from indexer.replay.frames import save_frame

    load_kernels()
    first = copied.first
    before = LogMoment(index=begin)
    if first.time_s is not None:
        before = LogMoment(time_s=math.ceil(first.time_s * 1000 - 1) / 1000)
    if first.offsets is None:
        views = Timeline(log).at(before)
        views.take_time_back()
        save_frame(new_log, views, 0, 0)


def merge(
    logs: Annotated[list[Path], typer.Argument(help="Folders of event logs, and last that of the new log.")],
    as_json: AsJson = False,
) -> None:
    """Merge logs into a new one, in the order of time.

    Records of one log keep their order. A record that several logs have is copied once. Records keep their partition
    and offset, so merge recordings of the same topics, or of different channels.

    Example: kvsight log merge monday.log tuesday.log both.log
    """
    *inputs, new_log = logs
    if len(inputs) < 2:
        raise UsageError("give at least two logs, and the folder of the new one")
    sources = [LogInput(folder) for folder in inputs]
    recent = _Recent()
    check_new_log(new_log)
    with EventLogWriter(new_log) as writer, progress_bar() as bar:
        ordered = heapq.merge(*(_by_time(source, number, bar) for number, source in enumerate(sources)))
        for _, number, _, record in ordered:
            if recent.is_new(record, number):
                writer.append(record)
    _report_new(new_log, writer.next_index, sources, as_json)


def _by_time(source: LogInput, number: int, bar: Progress) -> Iterator[tuple[int, int, int, LogRecord]]:
    """Yield (time, number of the log, index, record). Times never go back, so that the order of a log is kept."""
    latest = -(2**63)
    for index, record in source.records(f"merging {source.folder}", bar):
        latest = max(latest, record.timestamp_ms)
        yield latest, number, index, record


class _Recent:
    """Finds records that another log has brought a short while before."""

    def __init__(self) -> None:
        self._logs: OrderedDict[int, int] = OrderedDict()  # hash of a record -> number of the log that brought it

    def is_new(self, record: LogRecord, number: int) -> bool:
        """Return whether no other log has brought a record. number: of its log."""
        if self._logs.setdefault(hash(record), number) != number:
            return False
        if len(self._logs) > _MOST_REMEMBERED:
            self._logs.popitem(last=False)
        return True


def _remove(new_log: Path) -> None:
    """Remove a new log without records, so that the command can be repeated."""
    for segment in list_segments(new_log):
        segment.path.unlink()
    (new_log / LOCK_NAME).unlink()
    with suppress(OSError):  # somebody else's files are in it
        new_log.rmdir()


# --- export ---------------------------------------------------------------------------------------------------------


def export(
    log: LogFolder,
    parquet: Annotated[Path, typer.Option(help="Folder for the Parquet files, new or empty.")],
    at: Annotated[str | None, typer.Option(help="The moment of the views. Default: the end of the log.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the events and the views of a log as Parquet files.

    events.parquet has a row for each page that a batch stores or removes, views.parquet one for each page that a worker
    holds. --at accepts what `kvsight replay --at` does.

    Example: kvsight log export run.log --parquet run.parquet
    """
    require("analysis", "kvsight log export")
    source, moment = LogInput(log), LogMoment.parse(at, "--at")
    if parquet.exists() and (not parquet.is_dir() or any(parquet.iterdir())):
        raise UsageError(f"{parquet}: not an empty folder")
    from analysis.parquet import write_events, write_views

    load_kernels()
    replayed = LogInput(log)
    views, extent = replayed.views_at(moment)
    fault = moment_fault(extent, moment)
    if fault:
        raise UsageError(fault)
    source.faults, source.warnings = replayed.faults, replayed.warnings
    parquet.mkdir(parents=True, exist_ok=True)
    num_events = write_events(parquet / "events.parquet", source.records("exporting"))
    num_pages = write_views(parquet / "views.parquet", views)
    facts = {"folder": str(parquet), "event_rows": num_events, "pages_held": num_pages}
    _report(
        facts, f"{parquet}: {count(num_events, 'row')} of events, {count(num_pages, 'page')} held", [source], as_json
    )


def _report_new(new_log: Path, num_records: int, sources: list[LogInput], as_json: bool) -> None:
    facts = {"new_log": str(new_log), "records": num_records}
    _report(facts, f"{new_log}: {count(num_records, 'record')}", sources, as_json)


def _report(facts: dict[str, object], line: str, sources: list[LogInput], as_json: bool) -> None:
    """Print what was written. Ends with exit code 1 if parts of the sources could not be read."""
    if as_json:
        print_json(facts | damage_facts(*sources))
    else:
        err.print(line)
    exit_if_any_damaged(sources)
