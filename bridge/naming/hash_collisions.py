"""Pages that share an engine's hash with another page: which hashes of the ledger a removal means."""

from __future__ import annotations

import numpy as np

from bridge.naming.hash_translator import Space, SpecialPage
from kv_events.hashing import U64Array

_MOST = 65_536
"""Engine hashes kept; beyond, the oldest one's variants are given up."""


class Variants:
    """The engine's hash -> the other hashes under which the ledger may know pages of it."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str | None, int], set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def add(self, page: SpecialPage, space: Space) -> tuple[str | None, U64Array] | None:
        """Keep a variant. Returns namespace and hashes of what is given up for it: to be taken off all media."""
        self._hashes.setdefault((space.label, page.base), set()).add(page.block_hash)
        if len(self._hashes) <= _MOST:
            return None
        oldest = next(iter(self._hashes))
        return oldest[0], np.array(sorted(self._hashes.pop(oldest)), np.uint64)

    def all_of(self, block_hashes: U64Array, space: Space) -> U64Array:
        """Hashes and their variants: an engine's removal does not say which of them it means, so it means all."""
        if not self._hashes:
            return block_hashes
        others = [other for base in block_hashes.tolist() for other in self._hashes.get((space.label, base), ())]
        return np.concatenate((block_hashes, np.array(others, np.uint64))) if others else block_hashes

    def clear(self) -> None:
        """Forget all."""
        self._hashes.clear()
