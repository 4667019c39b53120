"""What the router saw: views rebuilt from a log, up to an offset or a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from indexer.applier import Applier
from indexer.dead_letters import DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from kv_events.event_log import EventLogReader
from kv_events.records import LogRecord


@dataclass(frozen=True, slots=True)
class Until:
    """Which records a replay takes: those before all of the given bounds."""

    offset: int | None = None
    """Index in an event log; offset in every partition of a topic."""
    positions: Mapping[int, int] | None = None
    """Partition -> offset, as a consumer's `positions`; partitions that it does not name are left out."""
    time_s: float | None = None
    """Seconds since 1970; records of exactly that time are still applied."""

    def takes(self, record: LogRecord) -> bool:
        """Whether a record is to be applied."""
        if self.offset is not None and record.offset >= self.offset:
            return False
        if self.positions is not None and record.offset >= self.positions.get(record.partition, 0):
            return False
        return self.time_s is None or record.timestamp_ms <= self.time_s * 1000


@dataclass
class Replay:
    """Views that grow record by record, with the clock of the log."""

    settings: IndexerSettings = field(default_factory=lambda: IndexerSettings())

    def __post_init__(self) -> None:
        self.applier = Applier(Namespaces(self.settings), DeadLetters())
        self.freshness = Freshness(self.settings.worker_ttl_s, 0.0)
        self.now = 0.0
        """Seconds since 1970: the time of the newest record applied."""

    @property
    def namespaces(self) -> Namespaces:
        """The views."""
        return self.applier.namespaces

    def apply(self, record: LogRecord) -> None:
        """Apply one record as the consumer would have."""
        self.now = max(self.now, record.timestamp_ms / 1000)
        self.freshness.log_is_alive(self.now)
        for _ in self.applier.apply(record, record.timestamp_ms / 1000):
            pass

    def apply_all(self, records: Iterable[LogRecord], until: Until | None = None) -> Replay:
        """Apply the records that `until` takes. Returns itself.

        Goes through all of them: a log of several partitions is not in order of time.
        """
        for record in records:
            if until is None or until.takes(record):
                self.apply(record)
        return self


def log_records(folder: Path, stop: int | None = None) -> Iterator[LogRecord]:
    """The records of an event log, up to before index `stop`; their offsets are their indices in it.

    Raises EventLogError.
    """
    reader = EventLogReader(folder)
    for index, record in reader.read(reader.first_index, stop):
        yield record._replace(offset=index)
