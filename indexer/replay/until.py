"""The end of a replay. This module loads no kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kv_events.records import LogRecord


@dataclass(frozen=True, slots=True)
class Until:
    """The end of a replay: records before all of the given limits are applied."""

    offset: int | None = None
    """Index in an event log, or offset in every partition of a topic."""
    positions: Mapping[int, int] | None = None
    """Partition -> offset, as in a consumer's `positions`. Other partitions are left out."""
    time_s: float | None = None
    """Seconds since 1970. Records with exactly this time are still applied."""

    def takes(self, record: LogRecord) -> bool:
        """Return whether a record is to be applied."""
        if self.offset is not None and record.offset >= self.offset:
            return False
        if self.positions is not None and record.offset >= self.positions.get(record.partition, 0):
            return False
        return self.time_s is None or record.timestamp_ms <= self.time_s * 1000
