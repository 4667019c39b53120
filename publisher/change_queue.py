"""The bounded queue of page changes between the engine's thread and the drain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError
from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import pin
from publisher.kernels.changes import BROKEN, HEAD, TAIL, TAKEN, QueueArrays


class PageChanges(NamedTuple):
    """Stores and removals of single pages, and clears, in the order in which they happened, as columns."""

    kinds: npt.NDArray[np.uint8]
    """[n] medium for a store, REMOVAL + medium for a removal, or CLEARED."""
    hashes: npt.NDArray[np.uint64]
    """[n] sequence hashes."""
    block_hashes: npt.NDArray[np.uint64]
    """[n] block hashes."""
    parents: npt.NDArray[np.uint64]
    """[n] for a store, sequence hash of the parent. 0 if there is none or it is unknown."""
    spans: npt.NDArray[np.uint32]
    """[n] number of the span, ascending modulo 2**32. Within one span, no page is removed from a medium after it was
    stored there, so the removals of a span may be sent before its stores. A clear has its own span."""

    def part(self, start: int, stop: int) -> PageChanges:
        """Return views of changes `start` to `stop` (exclusive)."""
        return PageChanges._make(column[start:stop] for column in self)


class ChangeQueue:
    """A ring of page changes, 29 bytes each, filled by the ledger's kernels. The publisher's lock guards it.

    Changes in flight count against the capacity until the sink confirms them. If a change does not fit, all waiting
    changes are dropped and the stream is broken. No further changes are queued until `restart()` is called for the
    resync.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidValueError("queue_pages", capacity, "a positive integer")
        self.arrays = QueueArrays(
            zeros(capacity, np.uint8),
            zeros(capacity, np.uint64),
            zeros(capacity, np.uint64),
            zeros(capacity, np.uint64),
            zeros(capacity, np.uint32),
            np.zeros(6, np.int64),
        )
        self.pinned = pin(self.arrays)
        """`arrays`, for kernels."""
        self._num_delivered = 0

    @property
    def num_queued(self) -> int:
        cursors = self.arrays.cursors
        return int(cursors[HEAD] - cursors[TAKEN])

    @property
    def is_broken(self) -> bool:
        """Whether the queue overflowed and the resync has not begun yet."""
        return bool(self.arrays.cursors[BROKEN])

    def peek(self, max_pages: int) -> PageChanges:
        """Return views of the oldest waiting changes, at most up to the end of the ring.

        Once they are taken, they are not overwritten before `confirm`.
        """
        start = int(self.arrays.cursors[TAKEN]) % len(self.arrays.kinds)
        return PageChanges._make(self.arrays[:5]).part(start, start + min(max_pages, self.num_queued))

    def take(self, num_pages: int) -> None:
        """Mark the oldest waiting changes as in flight."""
        self.arrays.cursors[TAKEN] += num_pages

    def confirm(self) -> None:
        """Free the space of all changes in flight after they were delivered or dropped."""
        cursors = self.arrays.cursors
        self._num_delivered += int(cursors[TAKEN] - cursors[TAIL])
        cursors[TAIL] = cursors[TAKEN]
        if cursors[HEAD] == cursors[TAKEN]:  # empty: restart at 0, where the ring is in memory already
            cursors[HEAD] = cursors[TAKEN] = cursors[TAIL] = 0

    def restart(self) -> None:
        """Drop all waiting changes, because a resync covers them, and accept changes again."""
        cursors = self.arrays.cursors
        cursors[HEAD] = cursors[TAKEN]
        cursors[BROKEN] = 0

    def stats(self) -> dict[str, int]:
        """Numbers of page changes, see `PublisherStats`: a page that comes to another tier, or leaves one, is one."""
        head, taken, tail, dropped, *_ = self.arrays.cursors.tolist()
        return {
            "queued": head - taken, "in_flight": taken - tail, "delivered": self._num_delivered, "dropped": dropped,
        }  # fmt: skip
