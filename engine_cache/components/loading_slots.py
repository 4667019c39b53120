"""Slots of requests that loads are filling."""

from __future__ import annotations

import numpy as np

from engine_cache.types import IndexArray, no_indices


class LoadingSlots:
    """Keeps a slot that its request gives up during a load from its next owner until the load has ended, because the
    late copy would overwrite the state of that owner. Belongs to the thread of the tree."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # load -> the slot it fills
        self._given_up: set[int] = set()

    def begin(self, load: int, slot: IndexArray) -> None:
        """A load fills this slot, [1], of a request."""
        self._slots[load] = int(slot[0])

    def give_up(self, slot: IndexArray) -> bool:
        """The request no longer needs its slot. True: a load still fills it, and `end` will return it."""
        is_loading = int(slot[0]) in self._slots.values()
        if is_loading:
            self._given_up.add(int(slot[0]))
        return is_loading

    def end(self, load: int) -> IndexArray:
        """The load has ended. Returns the slot that can be freed now, if there is one."""
        slot = self._slots.pop(load, None)
        if slot is None or slot not in self._given_up or slot in self._slots.values():
            return no_indices()
        self._given_up.remove(slot)
        return np.array([slot], np.int64)

    def given_up(self) -> IndexArray:
        """Slots that belong to loads alone."""
        return np.array(sorted(self._given_up), np.int64)
