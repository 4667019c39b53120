"""The offsets up to which an event log has copied each partition, so that copying can continue after a restart."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from kv_events.log.files import delete_unfinished, replace_file
from kv_events.records import LogRecord

_NAME = "positions.json"


class _Saved(msgspec.Struct):
    index: int
    """Index of the first record of the log that is not counted."""
    positions: dict[int, dict[int, int]]


class LogPositions:
    """Channel -> partition -> offset after its newest record.

    A file beside the segments spares a restart from reading the whole log. It may be old or missing.
    """

    def __init__(self, folder: Path, next_index: int, *, is_empty: bool = False) -> None:
        """Read the file, and the records since it was written. Raises OSError.

        next_index: of the log. is_empty: read nothing, because the offsets of before mean nothing.
        """
        self._path = folder / _NAME
        self._positions: defaultdict[int, dict[int, int]] = defaultdict(dict)
        delete_unfinished(folder, _NAME)
        if is_empty:
            return
        from kv_events.log.reader import scan_log  # loads a kernel

        start, saved = 0, _read(self._path)
        if saved is not None and saved.index <= next_index:
            self._positions.update(saved.positions)
            start = saved.index
        for chunk in scan_log(folder, lambda _damage: None, start):  # what is damaged needs no position
            new = chunk._replace(rows=chunk.rows[max(0, start - chunk.first_index) :])
            for channel in np.unique(new.channels).tolist():
                self._positions[channel] |= {partition: last + 1 for partition, _, last in new.offsets(channel)}

    def of(self, channel: int) -> dict[int, int]:
        """Partition -> offset of the next record of a channel."""
        return dict(self._positions[channel])

    def set(self, channel: int, begins: Mapping[int, int]) -> None:
        """Go on with other offsets. begins: partition -> offset of the record that will be copied next."""
        self._positions[channel] |= begins

    def has(self, record: LogRecord) -> bool:
        """Return whether the log has a record already."""
        return record.offset < self._positions[record.channel].get(record.partition, 0)

    def note(self, record: LogRecord) -> None:
        """Count a record that was appended."""
        self._positions[record.channel][record.partition] = record.offset + 1

    def save(self, index: int) -> None:
        """Write the file. index: of the next record of the log; those before it are on disk. Raises OSError."""
        replace_file(self._path, [msgspec.json.encode(_Saved(index, self._positions))])


def _read(path: Path) -> _Saved | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Saved)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None
