"""The decisions of a log, in the order of their times."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from analysis.audit.residency import milliseconds
from kv_events.decisions import DECISIONS_FOLDER, DecisionRecord, decode_decision
from kv_events.errors import RecordRejectedError
from kv_events.log.reader import OnDamage, scan_log
from kv_events.records import Channel, LogRecord

_BESIDE = -1
"""Index of decisions that are in a log of their own: they precede the records of the same millisecond."""


class SortedDecisions:
    """The decisions and outcomes of a log, in the order of their times. A temporary file keeps their bytes.

    A router may report a decision long after it was made. So they are read before the events.
    """

    def __init__(self, folder: Path) -> None:
        self.unreadable = 0
        """Records that cannot be decoded."""
        self.damage: list[str] = []
        """Parts of the decisions' own log that cannot be read."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        self._num_bytes = 0
        self._places = array("q")
        """Of each decision: its time in milliseconds, its index in the log, and the byte at which the file has it."""
        self._read_all(folder, lambda _: None)  # the audit reads this log again
        self._read_all(folder / DECISIONS_FOLDER, lambda error: self.damage.append(str(error)), _BESIDE)
        self._file.flush()
        self._ordered = self._in_order()
        self._next = next(self._ordered, None)

    def __len__(self) -> int:
        return len(self._places) // 3

    def before(self, ms: int, index: int) -> Iterator[DecisionRecord]:
        """Yield those that precede a record of this time and index, and were not yielded before."""
        while self._next is not None and self._next[:2] < (ms, index):
            yield decode_decision(self._next[2])
            self._next = next(self._ordered, None)

    def rest(self) -> Iterator[DecisionRecord]:
        """Yield those that were not yielded before."""
        while self._next is not None:
            yield decode_decision(self._next[2])
            self._next = next(self._ordered, None)

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
        self._places.extend((ms, index, self._num_bytes))
        self._num_bytes += self._file.write(record.payload)

    def _in_order(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (milliseconds, index, payload). Those of the same time and index keep the order of reading."""
        places = np.array(self._places).reshape(-1, 3)
        ends = np.append(places[:, 2], self._num_bytes)[1:]
        in_order = np.lexsort((places[:, 1], places[:, 0]))
        for ms, index, begin, end in map(np.ndarray.tolist, np.column_stack((places, ends))[in_order]):
            yield ms, index, os.pread(self._file.fileno(), end - begin, begin)
