"""Slots of requests that loads are filling."""

from __future__ import annotations

import numpy as np

from engine_cache.types import IndexArray, no_indices


class LoadingSlots:
    """A slot that its request gives up while a load is on its way to it is nobody's until the load has ended: the late
    copy would overwrite the state of the next owner. Belongs to the thread of the tree."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # by load: the slot it fills
        self._given_up: set[int] = set()

    def begin(self, load: int, slot: IndexArray) -> None:
        """A load fills this slot, [1], of a request."""
        self._slots[load] = int(slot[0])

    def give_up(self, slot: IndexArray) -> bool:
        """The request is through with its slot. True: a load is not, and `end` hands the slot out."""
        is_loading = int(slot[0]) in self._slots.values()
        if is_loading:
            self._given_up.add(int(slot[0]))
        return is_loading

    def end(self, load: int) -> IndexArray:
        """The load has ended. The slot that is to be freed now, if there is one."""
        slot = self._slots.pop(load, None)
        if slot is None or slot not in self._given_up or slot in self._slots.values():
            return no_indices()
        self._given_up.remove(slot)
        return np.array([slot], np.int64)

    def given_up(self) -> IndexArray:
        """Slots that only loads keep."""
        return np.array(sorted(self._given_up), np.int64)
