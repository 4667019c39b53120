"""Recurrent states of a simulated worker: where an engine saves them, and how they are inserted into the tree."""

from __future__ import annotations

from engine_cache import EvictParams, IndexArray, InsertParams, MambaSlotAllocator, RadixKey, TreeCache


class States:
    """The state slots of a cache for a model with recurrent layers."""

    def __init__(self, cache: TreeCache, slots: MambaSlotAllocator) -> None:
        self._cache = cache
        self._slots = slots

    def insert(self, key: RadixKey, rows: IndexArray, num_found: int, ends: set[int]) -> None:
        """Insert the key with a state at its end and, if slots are available, at each of `ends`.

        rows: one for each unit. The tree owns the first `num_found` and becomes the owner of the others.
        """
        lengths = sorted({end for end in ends if num_found < end < len(key)} | {len(key)})
        # all slots first: an eviction for one must not remove what the previous insert has added
        slots = self._allocate(len(lengths))
        for length, slot in zip(lengths[len(lengths) - len(slots) :], slots, strict=True):
            state = slot.reshape(1)
            params = InsertParams(key[:length], rows[:length], mamba_value=state, prev_prefix_len=num_found)
            if self._cache.insert(params).mamba_exist:
                self._slots.free(state)
            num_found = max(num_found, length)

    def _allocate(self, wanted: int) -> IndexArray:
        missing = wanted - self._slots.available_size()
        if missing > 0:
            self._cache.evict(EvictParams(0, mamba_num=missing))
        slots = self._slots.alloc(min(wanted, self._slots.available_size()))
        assert slots is not None, "the request fits into the free slots"
        return slots
