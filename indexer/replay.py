"""What the router saw: views rebuilt from a log, up to an offset or a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from indexer.applier import Applier
from indexer.dead_letters import DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.sources.base import Source
from kv_events.event_log import EventLogReader
from kv_events.records import LogRecord


@dataclass(frozen=True, slots=True)
class Until:
    """Where a replay stops: before the first record that is at or beyond any of the given bounds."""

    offset: int | None = None
    """Index in an event log; offset in every partition of a topic."""
    time_s: float | None = None
    """Seconds since 1970; records of exactly that time are still applied."""

    def reached(self, record: LogRecord) -> bool:
        """Whether a record is beyond the end."""
        if self.offset is not None and record.offset >= self.offset:
            return True
        return self.time_s is not None and record.timestamp_ms > self.time_s * 1000


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
        """Apply records until the end, or until `until` is reached. Returns itself."""
        for record in records:
            if until is not None and until.reached(record):
                break
            self.apply(record)
        return self


def log_records(folder: Path) -> Iterable[LogRecord]:
    """The records of an event log; their offsets are their indices in it. Raises EventLogError."""
    for index, record in EventLogReader(folder).read(EventLogReader(folder).first_index):
        yield record._replace(offset=index)


async def topic_records(source: Source, start: Mapping[int, int] | None = None) -> AsyncIterator[LogRecord]:
    """The records of a live log from `start` (or its beginning) up to where it ends now. Raises SourceUnavailableError.

    Records of one partition come in order; a partition that is passed by `until` does not end the others, so the
    caller filters.
    """
    await source.start(start or {})
    try:
        ends = dict(await source.ends())
        reached = {partition: (start or {}).get(partition, 0) for partition in ends}
        while any(reached[partition] < end for partition, end in ends.items()):
            for record in await source.fetch():
                if record.offset < ends.get(record.partition, 0):
                    yield record
                reached[record.partition] = record.offset + 1
    finally:
        await source.stop()
