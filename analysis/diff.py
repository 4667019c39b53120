"""The difference between what the workers hold at two moments, in two logs, or in a log and a live service.

Of two logs, also where they part: for each worker stream, the first batch that they do not have in common.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.replay import Replay
from kv_events.codec import batch_head
from kv_events.errors import InvalidValueError
from kv_events.hashing import U64Array
from kv_events.http.log import BatchInLog, MovedPage, StreamDiff
from kv_events.log.moments import LogMoment
from kv_events.log.reader import RecordChunk
from kv_events.records import Channel, LogRecord
from kv_events.schema import MEDIA
from kv_events.streams import StreamId

_TIER_OF_DUMP = {"device": 0, "host_pinned": 1, "disk": 2, "external": 3}
_EXAMPLES = 3
"""Pages of each kind that are named at most."""


class HeldPages(NamedTuple):
    """The pages that one worker stream holds."""

    hashes: U64Array
    """[n] sequence hashes, ascending."""
    tiers: npt.NDArray[np.uint8]
    """[n] bitmask: bit t = held on tier t."""


Holdings: TypeAlias = Mapping[StreamId, HeldPages]
"""What each worker stream holds."""

NOTHING = HeldPages(np.empty(0, np.uint64), np.empty(0, np.uint8))


def holdings_of(views: Replay) -> Holdings:
    """Return what the views of a replay hold."""
    found = {}
    for view in views.namespaces.views:
        held = view.all_pages()
        found[view.stream] = _sorted(held.hashes, held.tiers)
    return found


def holdings_of_dump(dump: Mapping[str, Any]) -> Holdings:
    """Return what the answer of GET /dump holds. Raises InvalidValueError if it is no such answer."""
    pages: dict[StreamId, dict[int, int]] = {}
    try:
        bases = {name: name.removesuffix(f":{part['block_size']}") for name, part in dump.items()}
        uses = Counter(bases.values())
        for name, part in dump.items():
            model, _, tenant = (bases[name] if uses[bases[name]] > 1 else name).rpartition(":")
            for each in part["events"]:
                event = each["event"]
                stream = StreamId(model, tenant, each["worker_id"], event["dp_rank"])
                held = pages.setdefault(stream, {})
                for block in event["data"]["stored"]["blocks"]:
                    page = block["block_hash"]
                    held[page] = held.get(page, 0) | 1 << _TIER_OF_DUMP[each["storage_tier"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidValueError("dump", repr(error), "an answer of GET /dump") from error
    return {
        stream: _sorted(np.array(list(held), np.uint64), np.array(list(held.values()), np.uint8))
        for stream, held in pages.items()
    }


def diff(before: Holdings, after: Holdings) -> list[StreamDiff]:
    """Return the difference of each worker stream of either side, in the order of their names."""
    streams = sorted({*before, *after})
    return [_diff(stream, before.get(stream, NOTHING), after.get(stream, NOTHING)) for stream in streams]


def _diff(stream: StreamId, before: HeldPages, after: HeldPages) -> StreamDiff:
    _, old, new = np.intersect1d(before.hashes, after.hashes, assume_unique=True, return_indices=True)
    moved = np.flatnonzero(before.tiers[old] != after.tiers[new])
    gained = np.delete(after.hashes, new)
    lost = np.delete(before.hashes, old)
    examples = [
        MovedPage(int(before.hashes[old[i]]), media_of(int(before.tiers[old[i]])), media_of(int(after.tiers[new[i]])))
        for i in moved[:_EXAMPLES].tolist()
    ]
    return StreamDiff(
        *stream,
        len(before.hashes),
        len(after.hashes),
        len(gained),
        len(lost),
        len(moved),
        gained[:_EXAMPLES].tolist(),
        lost[:_EXAMPLES].tolist(),
        examples,
    )


def _sorted(hashes: U64Array, tiers: npt.NDArray[np.uint8]) -> HeldPages:
    order = np.argsort(hashes)
    return HeldPages(hashes[order], tiers[order])


def media_of(tiers: int) -> list[str]:
    """Return the media of a bitmask of tiers."""
    return [medium.value for tier, medium in enumerate(MEDIA) if tiers >> tier & 1]


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
                batch = _Batch((head.epoch, head.seq), hash(record.payload), place)
                stream.take(side, batch, _MOST_WAITING // len(streams))
    found = {key.decode(errors="replace"): stream.end() for key, stream in streams.items()}
    return {key: ends for key, ends in found.items() if ends is not None}
