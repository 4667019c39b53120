"""The decisions of a log, in the order of their times."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from heapq import merge
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.audit.residency import milliseconds
from kv_events.decisions import DECISIONS_FOLDER, DecisionRecord, decode_decision
from kv_events.errors import RecordRejectedError
from kv_events.log.reader import OnDamage, scan_log
from kv_events.records import Channel, LogRecord

_BESIDE = -1
"""Index of decisions that are in a log of their own: they precede the records of the same millisecond."""
SORTED_BYTES = 64 * 2**20
"""Memory of the decisions that are sorted at one time. More are sorted in parts, which are merged from a file."""
_PLACED_BYTES = 250
"""Memory that a decision takes besides its payload."""
_READ_BYTES = 128 * 2**10
_HEAD = struct.Struct("<qqQI")  # of a decision in the file: its place, and the bytes of its payload


class _Placed(NamedTuple):
    """A decision and its place in time. Compares by time."""

    ms: int
    record: int
    """Its index in the log; `_BESIDE` if it is in another one."""
    number: int
    """In the order of reading."""
    payload: bytes


class Decisions:
    """The decisions and outcomes of a log, in the order of their times. Many are kept in a temporary file.

    A router may report a decision long after it was made. So they are read before the events.
    """

    def __init__(self, folder: Path, sorted_bytes: int = SORTED_BYTES) -> None:
        self.unreadable = 0
        """Records that cannot be decoded."""
        self.damage: list[str] = []
        """Parts of the decisions' own log that cannot be read."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        self._most_bytes = sorted_bytes
        self._number = 0
        self._part: list[_Placed] = []
        self._part_bytes = 0
        self._sorted_parts: list[tuple[int, int]] = []  # where they begin and end in the file
        self._read_all(folder, lambda _: None)  # the audit reads this log again
        self._read_all(folder / DECISIONS_FOLDER, lambda error: self.damage.append(str(error)), _BESIDE)
        self._part.sort()
        self._ordered = merge(*(self._read_part(*each) for each in self._sorted_parts), self._part)
        self._next = next(self._ordered, None)

    def __len__(self) -> int:
        return self._number

    def before(self, ms: int, index: int) -> Iterator[DecisionRecord]:
        """Yield those that precede a record of this time and index, and were not yielded before."""
        while self._next is not None and self._next[:2] < (ms, index):
            yield decode_decision(self._next.payload)
            self._next = next(self._ordered, None)

    def rest(self) -> Iterator[DecisionRecord]:
        """Yield those that were not yielded before."""
        while self._next is not None:
            yield decode_decision(self._next.payload)
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
        self._part.append(_Placed(ms, index, self._number, record.payload))
        self._number += 1
        self._part_bytes += _PLACED_BYTES + len(record.payload)
        if self._part_bytes > self._most_bytes:
            self._write_part()

    def _write_part(self) -> None:
        begin = self._file.tell()
        for each in sorted(self._part):
            self._file.write(_HEAD.pack(*each[:3], len(each.payload)) + each.payload)
        self._file.flush()
        self._sorted_parts.append((begin, self._file.tell()))
        self._part.clear()
        self._part_bytes = 0

    def _read_part(self, begin: int, end: int) -> Iterator[_Placed]:
        """Yield the decisions of a part of the file."""
        data = b""
        while begin < end or data:
            data += os.pread(self._file.fileno(), min(_READ_BYTES, end - begin), begin)
            begin = min(begin + _READ_BYTES, end)
            at = 0
            while at + _HEAD.size <= len(data):
                ms, record, number, num_bytes = _HEAD.unpack_from(data, at)
                stop = at + _HEAD.size + num_bytes
                if stop > len(data):
                    break
                yield _Placed(ms, record, number, data[at + _HEAD.size : stop])
                at = stop
            data = data[at:]
