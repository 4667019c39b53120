"""Where two logs part: for each worker stream, the first batch that they do not have in common."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from kv_events.codec import batch_head
from kv_events.http.log import BatchInLog
from kv_events.log.moments import LogMoment
from kv_events.log.reader import RecordChunk
from kv_events.records import Channel, LogRecord

_MOST_WAITING = 2**18
"""Bound on the batches of all streams that wait for their partners. A stream whose logs have begun alike may have four
times its share."""


class _Batch(NamedTuple):
    number: tuple[int, int]
    """Epoch and seq."""
    payload_hash: int
    place: BatchInLog


class _Stream:
    """The batches of a stream for which the other log has no partner yet."""

    def __init__(self) -> None:
        self.waiting: tuple[deque[_Batch], deque[_Batch]] = deque(), deque()
        self.firsts: list[_Batch | None] = [None, None]
        self.has_common = False
        self.parted: tuple[BatchInLog | None, BatchInLog | None] | None = None

    def take(self, side: int, batch: _Batch, most: int) -> None:
        """Take the next batch of a log. The log that begins later decides where the comparison begins.

        most: its share of the batches that may wait.
        """
        self.firsts[side] = self.firsts[side] or batch
        queue = self.waiting[side]
        queue.append(batch)
        if len(queue) > most and not self.has_common:
            queue.popleft()
        elif len(queue) > 4 * most:  # the other log has no more of the stream
            self.parted = (None, queue[0].place) if side else (queue[0].place, None)
        while self.parted is None and all(self.waiting):
            before, after = self.waiting[0][0], self.waiting[1][0]
            if before.number != after.number and not self.has_common:
                self.waiting[before.number > after.number].popleft()
            elif before[:2] != after[:2]:
                self.parted = before.place, after.place
            else:
                self.has_common = True
                for each in self.waiting:
                    each.popleft()

    def end(self) -> tuple[BatchInLog | None, BatchInLog | None] | None:
        """Return the first batches that differ; None for a log that has ended before. None: no batch differs."""
        rest = [next(iter(each), None) for each in self.waiting] if self.has_common else self.firsts
        before, after = (None if each is None else each.place for each in rest)
        return self.parted or ((before, after) if before or after else None)


def records_before(chunks: Iterable[RecordChunk], moment: LogMoment) -> Iterator[tuple[int, LogRecord]]:
    """Yield the records of a log before a moment, with their indices."""
    for chunk in chunks:
        for row in np.flatnonzero(chunk.before(moment)).tolist():
            yield chunk.first_index + row, chunk.record(row)


def first_differences(
    before: Iterable[tuple[int, LogRecord]], after: Iterable[tuple[int, LogRecord]]
) -> dict[str, tuple[BatchInLog | None, BatchInLog | None]]:
    """Return the key of each stream whose batches differ -> its first differing batch in either log.

    before, after: the records of the logs, with their indices. Both are read at the same pace, so that memory is needed
    only for what one log has and the other has not yet.
    """
    streams: dict[bytes, _Stream] = {}
    for pair in zip_longest(before, after):
        for side, each in enumerate(pair):
            if each is None or each[1].channel != Channel.EVENTS:
                continue
            index, record = each
            head = batch_head(record.payload)
            stream = streams.setdefault(record.key, _Stream())
            if head is not None and stream.parted is None:
                place = BatchInLog(index=index, time=record.timestamp_ms / 1000, epoch=head.epoch, seq=head.seq)
                stream.take(
                    side, _Batch((head.epoch, head.seq), hash(record.payload), place), _MOST_WAITING // len(streams)
                )
    found = {key.decode(errors="replace"): stream.end() for key, stream in streams.items()}
    return {key: ends for key, ends in found.items() if ends is not None}
