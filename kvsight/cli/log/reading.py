"""Reading of a whole event log by a command: progress, extent, and damage, which ends with exit code 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeAlias

import typer

from kv_events.log.event_log import EventLogCorruptedError, EventLogError
from kv_events.log.format import list_segments
from kv_events.log.moments import LogExtent
from kv_events.log.tail import TornTail, torn_tail
from kvsight.cli.console import UsageError, err, progress_bar
from kvsight.cli.moments import extent_text

if TYPE_CHECKING:
    from rich.progress import Progress

    from indexer.replay import Replay
    from kv_events.log.reader import RecordChunk
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
    tail: TornTail | None = None
    """The torn tail. None while a writer has the log open."""
    faults: list[str] = field(default_factory=list)
    """Other files that could not be used."""
    warnings: list[str] = field(default_factory=list)
    """What is unknown although nothing is damaged."""

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise EventLogError(f"{self.folder}: no such folder")
        if not list_segments(self.folder):
            raise EventLogError(f"{self.folder}: not an event log: it has no files *.kvlog")
        self.extent = LogExtent(str(self.folder))

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.path.stat().st_size for segment in list_segments(self.folder))

    def chunks(self, what: str, shared: Progress | None = None) -> Iterator[RecordChunk]:
        """Yield all sound records, as chunks. what: for the progress bar, or for its line of a shared one.

        Raises OSError.
        """
        from kv_events.log.reader import scan_log

        with progress_bar() if shared is None else nullcontext(shared) as bar:
            task = bar.add_task(f"{what} (MiB)", total=self.num_bytes // _MIB)
            done, last = 0, None
            for chunk in scan_log(self.folder, self.damage.append):
                done += chunk.end - chunk.position
                chunk.note_in(self.extent)
                yield chunk
                bar.update(task, completed=done // _MIB)
                last = chunk
        self.tail = torn_tail(self.folder, last, self.damage)

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
        from kv_events.log.reader import scan_segment

        last, damage = None, list[EventLogCorruptedError]()
        for chunk in scan_segment(list_segments(self.folder)[-1], damage.append):
            last = chunk
        self.tail = torn_tail(self.folder, last, damage)

    def exit_if_damaged(self) -> None:
        """Print warnings and what could not be read. Ends with exit code 1 unless everything was read."""
        exit_if_any_damaged([self])

    @property
    def damage_lines(self) -> list[str]:
        """What could not be read, one line each."""
        return [*map(str, self.damage), *self.faults, *([str(self.tail)] if self.tail else [])]

    def fail_outside(self, what: str) -> NoReturn:
        """End because a range has no record. Raises UsageError with the extent of the log."""
        extent = self.extent
        indices = f", indices {extent.first_index} to {extent.next_index - 1}" if extent.num_records else ""
        raise UsageError(f"{what} is outside the log: {extent_text(extent)}{indices}")


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
