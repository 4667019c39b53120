"""The log of the embedded mode: passes records and resync requests between threads of one process."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from kv_events.errors import KvsightError, check_positive
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest

_T = TypeVar("_T")


class LogTruncatedError(KvsightError):
    """Records from the requested offset are no longer kept."""

    def __init__(self, offset: int, first: int) -> None:
        super().__init__(f"offset {offset} was dropped; the log begins at {first}")
        self.offset = offset
        self.first = first


class MemoryLog:
    """A bounded in-process log of one partition, with a control channel in the other direction. Thread-safe.

    Beyond `capacity_bytes` of payload, the oldest records are dropped. A reader that missed them gets
    `LogTruncatedError`, as with the retention of a Kafka topic.
    """

    def __init__(
        self,
        capacity_bytes: int = 256 * 2**20,
        *,
        is_read_once: bool = False,
        on_record: Callable[[LogRecord], None] | None = None,
    ) -> None:
        """is_read_once: there is one reader, which never seeks backwards, so records before its offset are dropped.
        on_record: receives each record in order, on the thread of its writer; must not wait.
        """
        check_positive(capacity_bytes=capacity_bytes)
        self._capacity_bytes = capacity_bytes
        self._is_read_once = is_read_once
        self._on_record = on_record
        self._lock = threading.Lock()  # guards everything below
        self._records: deque[LogRecord] = deque()
        self._num_bytes = 0
        self._first = 0
        self._on_append: list[Callable[[], None]] = []
        self._on_request: list[Callable[[ResyncRequest], None]] = []

    @property
    def first_offset(self) -> int:
        return self._first

    @property
    def next_offset(self) -> int:
        with self._lock:
            return self._first + len(self._records)

    def append(self, key: bytes, payload: bytes, timestamp_ms: int) -> int:
        with self._lock:
            offset = self._first + len(self._records)
            record = LogRecord(0, offset, timestamp_ms, key, payload)
            self._records.append(record)
            if self._on_record is not None:
                self._on_record(record)
            self._num_bytes += len(payload)
            while self._num_bytes > self._capacity_bytes and len(self._records) > 1:
                self._drop_oldest()
            listeners = list(self._on_append)
        for listener in listeners:
            listener()
        return offset

    def read(self, offset: int, max_records: int = 500) -> Sequence[LogRecord]:
        """Return records from `offset`, at most `max_records`. Raises LogTruncatedError."""
        with self._lock:
            if offset < self._first:
                raise LogTruncatedError(offset, self._first)
            while self._is_read_once and self._records and self._first < offset:
                self._drop_oldest()
            start = offset - self._first
            stop = min(start + max_records, len(self._records))
            return [self._records[i] for i in range(start, stop)]

    def request(self, request: ResyncRequest) -> None:
        with self._lock:
            listeners = list(self._on_request)
        for listener in listeners:
            listener(request)

    def watch(self, on_append: Callable[[], None]) -> Callable[[], None]:
        """Call a function after each record, on the thread of its writer. Returns a function to unsubscribe."""
        return self._subscribe(self._on_append, on_append)

    def listen(self, on_request: Callable[[ResyncRequest], None]) -> Callable[[], None]:
        """Call a function for each resync request, on the thread of the caller. Returns a function to unsubscribe."""
        return self._subscribe(self._on_request, on_request)

    def _drop_oldest(self) -> None:
        self._num_bytes -= len(self._records.popleft().payload)
        self._first += 1

    def _subscribe(self, listeners: list[_T], listener: _T) -> Callable[[], None]:
        with self._lock:
            listeners.append(listener)

        def stop() -> None:
            with self._lock:
                listeners.remove(listener)

        return stop
