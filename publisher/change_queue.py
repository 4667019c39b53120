"""The bounded queue of page changes between the engine's thread and the drain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events.bundles import resident
from kv_events.errors import InvalidValueError
from publisher.queue_kernels import BROKEN, HEAD, TAIL, TAKEN, QueueArrays


class PageChanges(NamedTuple):
    """Page changes in their order, column by column."""

    kinds: npt.NDArray[np.uint8]
    """[n] medium of a store, REMOVAL + medium, or CLEARED."""
    hashes: npt.NDArray[np.uint64]
    """[n] sequence hashes."""
    block_hashes: npt.NDArray[np.uint64]
    """[n]"""
    parents: npt.NDArray[np.uint64]
    """[n] for a store, sequence hash of the page before it; 0: none, or not known."""
    spans: npt.NDArray[np.uint32]
    """[n] number of the span, ascending modulo 2**32. Nothing is removed from a medium on which it was stored earlier
    in the same span, so that a span's removals may as well be told first; a clear is a span of its own."""

    def part(self, start: int, stop: int) -> PageChanges:
        """Views of changes start .. stop."""
        here = slice(start, stop)
        return PageChanges(
            self.kinds[here], self.hashes[here], self.block_hashes[here], self.parents[here], self.spans[here]
        )


class QueueStats(NamedTuple):
    """Page changes by where they are."""

    queued: int
    """Waiting."""
    in_flight: int
    """Taken, not confirmed by the sink."""
    delivered: int
    """Confirmed, ever."""
    dropped: int
    """Given up to a full queue, ever; each made up for by a snapshot."""
    is_broken: bool
    """Whether the queue overflowed and a snapshot has still to begin."""


class ChangeQueue:
    """A ring of page changes, 29 bytes each, filled by the ledger's kernels. The publisher's lock guards it.

    The bound counts what the sink has not confirmed, too. A change that finds no room drops all that waits: the
    stream is broken then, nothing more is queued, and `restart()` begins anew when a snapshot of the ledger is due.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidValueError("queue_pages", capacity, "a positive integer")
        self.arrays = QueueArrays(
            np.zeros(capacity, np.uint8),
            np.zeros(capacity, np.uint64),
            np.zeros(capacity, np.uint64),
            np.zeros(capacity, np.uint64),
            np.zeros(capacity, np.uint32),
            np.zeros(6, np.int64),
        )
        self.resident = resident(self.arrays)
        """For kernels."""
        self._num_delivered = 0

    @property
    def num_queued(self) -> int:
        """Changes that wait."""
        cursors = self.arrays.cursors
        return int(cursors[HEAD] - cursors[TAKEN])

    @property
    def is_broken(self) -> bool:
        """See `QueueStats`."""
        return bool(self.arrays.cursors[BROKEN])

    def peek(self, max_pages: int) -> PageChanges:
        """Views of the oldest changes that wait, up to where the ring begins anew. Once they are taken, nothing is
        written over them before `confirm`.
        """
        ring, capacity = self.arrays, len(self.arrays.kinds)
        start = int(ring.cursors[TAKEN]) % capacity
        here = slice(start, min(start + min(max_pages, self.num_queued), capacity))
        return PageChanges(
            ring.kinds[here], ring.hashes[here], ring.block_hashes[here], ring.parents[here], ring.spans[here]
        )

    def take(self, num_pages: int) -> None:
        """The oldest changes are in flight now."""
        self.arrays.cursors[TAKEN] += num_pages

    def confirm(self) -> None:
        """All changes in flight were delivered, or given up; their room is free."""
        cursors = self.arrays.cursors
        self._num_delivered += int(cursors[TAKEN] - cursors[TAIL])
        cursors[TAIL] = cursors[TAKEN]
        if cursors[HEAD] == cursors[TAKEN]:  # empty: begin anew where the ring is in memory already
            cursors[HEAD] = cursors[TAKEN] = cursors[TAIL] = 0

    def restart(self) -> None:
        """Drop what waits, because a snapshot covers it, and queue again."""
        cursors = self.arrays.cursors
        cursors[HEAD] = cursors[TAKEN]
        cursors[BROKEN] = 0

    def stats(self) -> QueueStats:
        """Figures for metrics and tests."""
        head, taken, tail, dropped, broken, _group = self.arrays.cursors.tolist()
        return QueueStats(head - taken, taken - tail, self._num_delivered, dropped, bool(broken))
