"""What is recorded of one source: its channel, its range, and the worker or the model."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from indexer.sources.base import Source
from kv_events.codec import batch_or_none
from kv_events.decisions import Outcome
from kv_events.errors import RecordRejectedError
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.reservations import CHOICES, Progressed, Reserved, decode_record, joined, singles
from kv_events.streams import split_group

_MAX_REQUESTS = 65_536
_KEY_PARTS = 4


@dataclass
class Feed:
    """One source, and what of it is recorded."""

    source: Source
    channel: Channel
    name: str
    """Of the topic, for log lines."""
    begins: Mapping[int, int] = field(default_factory=dict)
    """Partition -> first offset. Others begin with the oldest record."""
    since_s: float | None = None
    """Earlier records are left out. Seconds since 1970."""
    until: LogMoment = field(default_factory=LogMoment)
    """The end of the range."""
    select: Callable[[LogRecord], LogRecord | None] = lambda record: record
    """Returns what is recorded of a record. None: nothing."""
    is_recorded: bool = True
    """Whether the records themselves are recorded."""
    has_dead_letters: bool = False
    """Whether records that cannot be decoded are recorded in the channel of dead letters, too."""

    def selected(self, records: Iterable[LogRecord]) -> Iterator[LogRecord]:
        """Yield what is to be recorded, with its channel."""
        for record in records:
            is_late = self.since_s is None or record.timestamp_ms >= self.since_s * 1000
            if not is_late or not self.until.takes(record):
                continue
            if (selected := self.select(record._replace(channel=self.channel))) is not None:
                if self.is_recorded:
                    yield selected
                if self.has_dead_letters and batch_or_none(record.payload) is None:
                    yield record._replace(channel=Channel.DEAD_LETTERS)

    def goal(self, ends: Mapping[int, int], *, once: bool) -> Mapping[int, int] | None:
        """Partition -> offset at which the range ends. None: not known yet, or it never ends.

        ends: of the source, now. once: the range ends there at the latest.
        """
        if self.until.offsets is not None:
            return {part: min(end, ends.get(part, 0) if once else end) for part, end in self.until.offsets.items()}
        is_over = self.until.time_s is not None and time.time() > self.until.time_s
        return ends if once or is_over else None


class Selection:
    """Selects the records of one worker, or of one model."""

    def __init__(self, worker: str | None, model: str | None) -> None:
        """None: all."""
        self._worker = worker
        self._model = model
        self._requests: OrderedDict[str, None] = OrderedDict()  # ids of selected decisions, newest last

    def select(self, record: LogRecord) -> LogRecord | None:
        """Return what of a record belongs to the selection. What followed selected decisions does."""
        if self._worker is None and self._model is None:
            return record
        if record.channel not in CHOICES:
            return record if self._takes_stream(record.key) else None
        payloads = singles(record.payload)
        taken = [each for each in payloads if self._takes_choice(record.channel, each)]
        if len(taken) == len(payloads):
            return record
        return record._replace(payload=joined(len(taken), b"".join(taken))) if taken else None

    def _takes_stream(self, key: bytes) -> bool:
        """key: that of a worker stream, `tenant/model/worker/rank`, each part percent-encoded."""
        parts = [unquote(part) for part in key.decode(errors="replace").split("/")]
        if len(parts) != _KEY_PARTS:
            return False
        _, model, worker, _ = parts
        return self._model in (None, split_group(model)[0]) and self._worker in (None, worker)

    def _takes_choice(self, channel: int, payload: bytes) -> bool:
        try:
            found = decode_record(channel, payload)
        except RecordRejectedError:
            return False
        if isinstance(found, Progressed):
            return found.reservation_id in self._requests
        if isinstance(found, Outcome):
            return found.request_id in self._requests
        found = found.decision if isinstance(found, Reserved) else found
        if self._model not in (None, found.model) or self._worker not in (None, found.worker):
            return False
        self._requests[found.request_id] = None
        if len(self._requests) > _MAX_REQUESTS:
            self._requests.popitem(last=False)
        return True
