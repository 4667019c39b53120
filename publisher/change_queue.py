"""The bounded queue of page changes between the engine's thread and the drain."""

import numpy as np

from kv_events.errors import check_positive
from kv_events.kernels.arrays import zeros
from publisher.kernels.changes import BROKEN, HEAD, TAIL, TAKEN, PageChanges, QueueArrays


class ChangeQueue:
    """A ring of page changes, 29 bytes each, filled by the ledger's kernels. The publisher's lock guards it.

    Changes in flight count against the capacity until the sink confirms them. If a change does not fit, all waiting
    changes are dropped and the stream is broken. No further changes are queued until `restart()` is called for the
    resync.
    """

    def __init__(self, capacity: int) -> None:
        check_positive(queue_pages=capacity)
        types = np.uint8, np.uint64, np.uint64, np.uint64, np.uint32
        ring = PageChanges._make(zeros(capacity, each) for each in types)
        self.arrays = QueueArrays(ring, np.zeros(6, np.int64))
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
        start = int(self.arrays.cursors[TAKEN]) % len(self.arrays.ring.kinds)
        return self.arrays.ring.part(start, start + min(max_pages, self.num_queued))

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
