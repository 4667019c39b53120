"""The pages that a storage backend is known to hold."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable


class TrackedPages:
    """Keys of pages that were seen in a store. Beyond `limit` keys the one seen least recently is dropped and counts as
    lost. Any thread.

    The answer of a store that others use may be out of date when it arrives. The caller therefore reads `moment` before
    its request and passes it on with the answer. Pages seen before everything was lost or removed are ignored, and so
    are pages missed before they were last seen.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards the fields below
        self._held: OrderedDict[str, int] = OrderedDict()  # key -> moment it was seen, oldest first
        self._lost: dict[str, None] = {}  # for take_lost(), in order; disjoint from _held
        self._moment = 0
        self._emptied = 0  # the moment at which everything was last lost or removed

    @property
    def moment(self) -> int:
        """Grows with every change."""
        return self._moment

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._held

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def hold(self, keys: Iterable[str], moment: int) -> bool:
        """Add keys that were seen in the store after `moment`. False if they are ignored."""
        with self._lock:
            if moment < self._emptied:
                return False
            self._moment += 1
            for key in keys:
                self._lost.pop(key, None)
                self._held[key] = self._moment
                self._held.move_to_end(key)
            while self._limit is not None and len(self._held) > self._limit:
                oldest, _ = self._held.popitem(last=False)
                self._lost[oldest] = None
            return True

    def lose(self, keys: Iterable[str], moment: int) -> None:
        """Drop keys that were missing after `moment`. Keys that are not held do not count as lost."""
        with self._lock:
            for key in keys:
                if key in self._held and self._held[key] <= moment:
                    del self._held[key]
                    self._lost[key] = None

    def lose_all(self) -> None:
        """Drop all keys: the store is unreachable or was emptied."""
        with self._lock:
            self._moment = self._emptied = self._moment + 1
            self._lost.update(dict.fromkeys(self._held))
            self._held.clear()

    def forget_all(self) -> list[str]:
        """Drop all keys without counting them as lost, and return them."""
        with self._lock:
            held = list(self._held)
            self._moment = self._emptied = self._moment + 1
            self._held.clear()
            self._lost.clear()
            return held

    def take_lost(self) -> list[str]:
        """Return the keys that were lost since the last call and are not held again."""
        with self._lock:
            lost, self._lost = self._lost, {}
        return list(lost)
