"""`kvsight log slice` and `kvsight log merge`"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kv_events.log.event_log import EventLogWriter
from kv_events.log.format import LOCK_NAME, list_segments
from kv_events.log.moments import LogMoment
from kv_events.records import LogRecord
from kvsight.cli.logs.reading import LogFolder, LogInput, damage_facts, exit_if_any_damaged
from kvsight.cli.logs.records import (
    From,
    LogRange,
    OfChannel,
    OfModel,
    OfWorker,
    RecordFilter,
    Selection,
    To,
    channels_of,
)
from kvsight.cli.shared.console import UsageError, err, print_json, progress_bar
from kvsight.cli.shared.flags import AsJson
from kvsight.cli.shared.process import compile_kernels
from kvsight.cli.shared.tables import count

if TYPE_CHECKING:
    from rich.progress import Progress

NewLog = Annotated[Path, typer.Argument(help="Folder of the new log: a new or an empty one.")]

_MOST_REMEMBERED = 65_536


def slice_log(
    log: LogFolder,
    new_log: NewLog,
    first: From = None,
    last: To = None,
    worker: OfWorker = None,
    model: OfModel = None,
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
    selection = Selection(
        LogRange.of(first, last), RecordFilter(worker=worker, model=model, channels=channels_of(channel))
    )
    begin: int | None = None
    with _new_log(new_log) as writer:
        for chunk in source.chunks("copying"):
            for index, record in selection.records(chunk):
                begin = index if begin is None else begin
                writer.append(record)
    if not selection.num_in_range and (first or last):
        _remove(new_log)
        source.fail_outside(str(selection.range))
    if begin is not None and begin > source.extent.first_index and not (worker or model or channel):
        _keep_views(log, new_log, selection.range, begin)
    _report(new_log, writer.next_index, [source], as_json)


def _keep_views(log: Path, new_log: Path, copied: LogRange, begin: int) -> None:
    """Write the views before the first copied record into the new log."""
    compile_kernels("indexer.replay")
    from indexer.replay import Timeline
    from indexer.replay.frames import save_frame

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
    with _new_log(new_log) as writer, progress_bar() as bar:
        ordered = heapq.merge(*(_by_time(source, number, bar) for number, source in enumerate(sources)))
        for _, number, _, record in ordered:
            if recent.is_new(record, number):
                writer.append(record)
    _report(new_log, writer.next_index, sources, as_json)


def _report(new_log: Path, num_records: int, sources: list[LogInput], as_json: bool) -> None:
    """Print what a new log has. Ends with exit code 1 if parts of the others could not be read."""
    if as_json:
        print_json({"new_log": str(new_log), "records": num_records, **damage_facts(*sources)})
    else:
        err.print(f"{new_log}: {count(num_records, 'record')}", markup=False)
    exit_if_any_damaged(sources)


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


@contextmanager
def _new_log(folder: Path) -> Iterator[EventLogWriter]:
    """Open a writer of a new log. If the disk is full, the records before stay, and the error is raised."""
    if folder.exists() and (not folder.is_dir() or list_segments(folder)):
        raise UsageError(f"{folder}: there is a log already; give a new folder")
    with EventLogWriter(folder) as writer:
        yield writer
