"""Slots of requests that running loads write to."""

from __future__ import annotations

import numpy as np

from engine_cache.types import IndexArray, no_indices


class LoadingSlots:
    """Prevents the reuse of a slot that its request releases during a load, until the load has ended. Otherwise the
    load would overwrite the state of the next owner. Belongs to the tree's thread."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # load -> slot it writes to
        self._released: set[int] = set()

    def begin(self, load: int, slot: IndexArray) -> None:
        """Record that a load writes to this slot, [1], of a request."""
        self._slots[load] = int(slot[0])

    def release(self, slot: IndexArray) -> bool:
        """Release the slot of a request. Returns True if a load still writes to it; `end` returns the slot then."""
        is_loading = int(slot[0]) in self._slots.values()
        if is_loading:
            self._released.add(int(slot[0]))
        return is_loading

    def end(self, load: int) -> IndexArray:
        """Record the end of a load. Returns the slot that can be freed now, [1], or an empty array."""
        slot = self._slots.pop(load, None)
        if slot is None or slot not in self._released or slot in self._slots.values():
            return no_indices()
        self._released.remove(slot)
        return np.array([slot], np.int64)

    def released(self) -> IndexArray:
        """Return the slots that were released by their requests and are still in use by loads."""
        return np.array(sorted(self._released), np.int64)
