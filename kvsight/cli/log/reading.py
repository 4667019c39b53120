"""Reading of a whole event log by a command: progress, extent, and damage, which ends with exit code 1."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeAlias

import typer

from kv_events.event_log import LOCK_NAME, EventLogCorruptedError, EventLogError
from kv_events.log_segment import HEADER_BYTES, list_segments
from kvsight.cli.console import UsageError, err, progress_bar
from kvsight.cli.moments import LogSpan
from kvsight.cli.tables import count

if TYPE_CHECKING:
    from rich.progress import Progress

    from indexer.replay import Replay
    from kv_events.log_scan import RecordChunk
    from kv_events.records import LogRecord

EXIT_DAMAGED = 1
"""Exit code for a log of which something cannot be used. The rest has been used."""

_MIB = 2**20
_MOST_SHOWN = 20

LogFolder: TypeAlias = Annotated[Path, typer.Argument(help="Folder of an event log.")]


@dataclass
class LogInput:
    """An event log that a command reads once, from its beginning to its end. Raises EventLogError for no log."""

    folder: Path
    damage: list[EventLogCorruptedError] = field(default_factory=list)
    num_torn: int = 0
    """Bytes of an append that was cut off at the end of the log. 0 while a writer has the log open."""
    faults: list[str] = field(default_factory=list)
    """Other files that could not be used."""
    warnings: list[str] = field(default_factory=list)
    """What is unknown although nothing is damaged."""

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise EventLogError(f"{self.folder}: no such folder")
        if not list_segments(self.folder):
            raise EventLogError(f"{self.folder}: not an event log: it has no files *.kvlog")
        self.span = LogSpan(str(self.folder))
        self._end = (list_segments(self.folder)[-1].path, 0, 0)  # of the last segment: bytes that are records

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.path.stat().st_size for segment in list_segments(self.folder))

    def chunks(self, what: str, shared: Progress | None = None) -> Iterator[RecordChunk]:
        """Yield all sound records, as chunks. what: for the progress bar, or for its line of a shared one.

        Raises OSError.
        """
        from kv_events.log_scan import scan_log

        with progress_bar() if shared is None else nullcontext(shared) as bar:
            task = bar.add_task(f"{what} (MiB)", total=self.num_bytes // _MIB)
            done, last = 0, None
            for chunk in scan_log(self.folder, self.damage.append):
                done += chunk.end - chunk.position
                self.span.note_chunk(chunk)
                yield chunk
                bar.update(task, completed=done // _MIB)
                last = chunk
        self._note_torn_tail(last, self.damage)

    def records(self, what: str, shared: Progress | None = None) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) of all sound records. See `chunks`."""
        for chunk in self.chunks(what, shared):
            yield from chunk.records()

    def views_before(self) -> Replay:
        """Return the views before the first record. Notes it if they are unknown, and why. Raises OSError."""
        from indexer.replay import open_beginning
        from indexer.settings import IndexerSettings

        beginning = open_beginning(self.folder, IndexerSettings())
        self.faults += filter(None, [beginning.fault])
        self.warnings += filter(None, [beginning.warning])
        return beginning.views

    def find_torn_tail(self) -> None:
        """Look for a torn tail in a log that is read by other means than `chunks`. Raises OSError."""
        from kv_events.log_scan import scan_segment

        last, damage = None, list[EventLogCorruptedError]()
        for chunk in scan_segment(list_segments(self.folder)[-1], damage.append):
            last = chunk
        self._note_torn_tail(last, damage)

    @property
    def torn_tail(self) -> str:
        """Where the torn tail is; empty if there is none."""
        path, end, index = self._end
        tail = f"{path}: a torn tail of {count(self.num_torn, 'byte')} at byte {end}, record {index}"
        return tail if self.num_torn else ""

    def exit_if_damaged(self) -> None:
        """Print warnings and what could not be read. Ends with exit code 1 unless everything was read."""
        exit_if_any_damaged([self])

    @property
    def damage_lines(self) -> list[str]:
        """What could not be read, one line each."""
        return [*map(str, self.damage), *self.faults, *filter(None, [self.torn_tail])]

    def fail_outside(self, what: str) -> NoReturn:
        """End because a range has no record. Raises UsageError with the extent of the log."""
        indices = f", indices {self.span.first_index} to {self.span.next_index - 1}" if self.span.records else ""
        raise UsageError(f"{what} is outside the log: {self.span}{indices}")

    def _note_torn_tail(self, last: RecordChunk | None, damage: list[EventLogCorruptedError]) -> None:
        segment = list_segments(self.folder)[-1]
        is_known = last is not None and last.segment.path == segment.path
        end, index = (last.end, last.next_index) if last is not None and is_known else (0, segment.first_index)
        end = max(end, HEADER_BYTES)
        is_damage = any(error.segment == segment.path and error.position in (0, end) for error in damage)
        num_left = segment.path.stat().st_size - end
        if num_left > 0 and not is_damage and not _is_written(self.folder):
            self.num_torn, self._end = num_left, (segment.path, end, index)


def exit_if_any_damaged(logs: Iterable[LogInput]) -> None:
    """Print the warnings of some logs and what could not be read. Ends with exit code 1 unless everything was read."""
    logs = list(logs)
    for line in dict.fromkeys(line for log in logs for line in log.warnings):
        err.print(f"warning: {line}", markup=False)
    lines = list(dict.fromkeys(line for log in logs for line in log.damage_lines))  # the logs may be the same
    for line in lines[:_MOST_SHOWN]:
        err.print(f"damaged: {line}", markup=False)
    if len(lines) > _MOST_SHOWN:
        err.print(f"and {len(lines) - _MOST_SHOWN} more")
    if lines:
        raise typer.Exit(EXIT_DAMAGED)


def _is_written(folder: Path) -> bool:
    """Whether a writer has the log open."""
    try:
        with (folder / LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
