"""The decisions of a log, in the order of their times."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.audit.book import milliseconds
from kv_events.decisions import DECISIONS_FOLDER, DecisionRecord, decode_decision
from kv_events.errors import RecordRejectedError
from kv_events.log_scan import OnDamage, scan_log
from kv_events.records import Channel, LogRecord

_BESIDE = -1
"""Index of decisions that are in a log of their own: they precede the records of the same millisecond."""


class _Place(NamedTuple):
    """Where a decision is kept. Compares by time."""

    ms: int
    record: int
    """Its index in the log; `_BESIDE` if it is in another one."""
    position: int
    num_bytes: int


class Decisions:
    """The decisions and outcomes of a log, in the order of their times. They are kept in a temporary file.

    A router may report a decision long after it was made. So they are read before the events.
    """

    def __init__(self, folder: Path) -> None:
        self.unreadable = 0
        """Records that cannot be decoded."""
        self.damage: list[str] = []
        """Parts of the decisions' own log that cannot be read."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        self._places: list[_Place] = []
        self._next = 0
        self._read_all(folder, lambda _: None)  # the audit reads this log again
        self._read_all(folder / DECISIONS_FOLDER, lambda error: self.damage.append(str(error)), _BESIDE)
        self._places.sort()

    def __len__(self) -> int:
        return len(self._places)

    def before(self, ms: int, index: int) -> Iterator[DecisionRecord]:
        """Yield those that precede a record of this time and index, and were not yielded before."""
        while self._next < len(self._places) and self._places[self._next][:2] < (ms, index):
            yield self._read(self._places[self._next])
            self._next += 1

    def rest(self) -> Iterator[DecisionRecord]:
        """Yield those that were not yielded before."""
        while self._next < len(self._places):
            yield self._read(self._places[self._next])
            self._next += 1

    def close(self) -> None:
        """Delete the temporary file."""
        self._file.close()

    def _read_all(self, folder: Path, on_damage: OnDamage, given: int | None = None) -> None:
        """given: index of all records. None: their own."""
        for chunk in scan_log(folder, on_damage):
            for row in np.flatnonzero(chunk.channels == Channel.DECISIONS).tolist():
                self._add(chunk.first_index + row if given is None else given, chunk.record(row))

    def _add(self, index: int, record: LogRecord) -> None:
        try:
            ms = milliseconds(decode_decision(record.payload).timestamp)
        except RecordRejectedError:
            self.unreadable += 1
            return
        self._places.append(_Place(ms, index, self._file.tell(), len(record.payload)))
        self._file.write(record.payload)

    def _read(self, place: _Place) -> DecisionRecord:
        self._file.seek(place.position)
        return decode_decision(self._file.read(place.num_bytes))
