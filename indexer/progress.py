"""The part of the event log that has been applied."""

from collections.abc import Mapping

from kv_events.records import LogRecord


class Progress:
    """Positions in the event log, and the goal that they are compared with.

    Until everything that was in the log at the start is applied, the goal is the log's end at the start. Afterwards it
    is the end as of the last probe.
    """

    def __init__(self) -> None:
        self.is_caught_up = False
        """Whether everything that was in the event log at the start has been applied."""
        self.positions: dict[int, int] = {}
        """Partition -> offset of the next record to apply."""
        self._goal: dict[int, int] | None = None
        self._behind: dict[int, int] = {}  # partition that was added -> its end at that time, until it is reached

    @property
    def is_started(self) -> bool:
        return self._goal is not None

    def start(self, begins: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Record that the event log was opened. begins: first offset that is read, by partition; ends: current end."""
        self.positions |= begins
        self._goal = dict(ends)

    def add(self, partition: int, end: int) -> None:
        self._behind[partition] = end

    def remove(self, partition: int) -> None:
        self.positions.pop(partition, None)
        self._behind.pop(partition, None)
        if self._goal is not None:
            self._goal.pop(partition, None)

    def is_behind(self, partition: int) -> bool:
        """Return whether an added partition has records of before that are not applied yet."""
        return partition in self._behind

    def is_applied(self, record: LogRecord) -> bool:
        return record.offset < self.positions.get(record.partition, 0)

    def advance(self, record: LogRecord) -> None:
        self.positions[record.partition] = record.offset + 1
        if self._behind:
            self.catch_up(record.partition)

    def catch_up(self, partition: int) -> None:
        """Note whether an added partition has been applied up to its end."""
        if self.positions.get(partition, 0) >= self._behind.get(partition, 0):
            self._behind.pop(partition, None)

    def has_reached(self, goal: Mapping[int, int]) -> bool:
        """Whether everything before some offsets has been applied. goal: partition -> offset."""
        return all(self.positions.get(partition, 0) >= end for partition, end in goal.items())

    def catches_up(self) -> bool:
        """Return True once, when the goal of the start has been reached."""
        if self.is_caught_up or self._goal is None or not self.has_reached(self._goal):
            return False
        self.is_caught_up = True
        return True

    def update_ends(self, ends: Mapping[int, int]) -> None:
        if self.is_caught_up:
            self._goal = dict(ends)

    def lag(self) -> int | None:
        """Records that are not applied yet, as of the last probe. None before the first."""
        if self._goal is None:
            return None
        return sum(max(0, end - self.positions.get(partition, 0)) for partition, end in self._goal.items())
