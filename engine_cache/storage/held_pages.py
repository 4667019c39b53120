"""What is told to be in a store that others fill and empty, too."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable


class HeldPages:
    """Keys of the pages that were seen in a store, at most `limit`: the one that was seen longest ago goes first, and
    counts as lost. Any thread.

    What a call found may be out of date when it returns. So the caller takes the `moment` before the call and hands it
    in with the result: what was found before everything was lost or removed is not believed, nor what was missed
    before it was seen.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards what follows
        self._held: OrderedDict[str, int] = OrderedDict()  # seen longest ago first; the moment after which that was
        self._lost: dict[str, None] = {}  # for take_lost(), in order; never also in _held
        self._moment = 0
        self._emptied = 0  # the moment after which everything was gone

    @property
    def moment(self) -> int:
        """Grows with whatever is told to this object."""
        return self._moment

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._held

    def keys(self) -> list[str]:
        """All of them; a copy."""
        with self._lock:
            return list(self._held)

    def hold(self, keys: Iterable[str], moment: int) -> bool:
        """These were seen in the store after that moment; whether that is believed."""
        with self._lock:
            if moment < self._emptied:
                return False
            self._moment += 1
            for key in keys:
                self._lost.pop(key, None)
                self._held[key] = self._moment
                self._held.move_to_end(key)
            while len(self._held) > self._limit:
                oldest, _ = self._held.popitem(last=False)
                self._lost[oldest] = None
            return True

    def lose(self, keys: Iterable[str], moment: int) -> None:
        """These were not found after that moment. What was not held is not lost either."""
        with self._lock:
            for key in keys:
                if key in self._held and self._held[key] <= moment:
                    del self._held[key]
                    self._lost[key] = None

    def lose_all(self) -> None:
        """The store is gone, or may be."""
        with self._lock:
            self._moment = self._emptied = self._moment + 1
            self._lost.update(dict.fromkeys(self._held))
            self._held.clear()

    def forget_all(self) -> list[str]:
        """The store was emptied on purpose: nothing is lost. What was held."""
        with self._lock:
            held = list(self._held)
            self._moment = self._emptied = self._moment + 1
            self._held.clear()
            self._lost.clear()
            return held

    def take_lost(self) -> list[str]:
        """Keys that were lost since the last call, and are not held again."""
        with self._lock:
            lost, self._lost = self._lost, {}
        return list(lost)
