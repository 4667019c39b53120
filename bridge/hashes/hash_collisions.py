"""Engine hashes that several pages share, and the ledger hashes of these pages."""

from __future__ import annotations

import numpy as np

from bridge.hashes.hash_translator import AmbiguousPage, HashNamespace
from kv_events.hashing import U64Array

_MOST = 65_536
"""Engine hashes that are kept. Beyond, the pages of the oldest one are dropped."""


class HashCollisions:
    """Engine hash -> the other hashes under which the ledger may hold its pages. True if there are any."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str | None, int], set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def add(self, page: AmbiguousPage, namespace: HashNamespace) -> tuple[str | None, U64Array] | None:
        """Add a page. If another hash had to make room, returns the namespace and hashes to remove from all media."""
        self._hashes.setdefault((namespace.label, page.engine_hash), set()).add(page.block_hash)
        if len(self._hashes) <= _MOST:
            return None
        oldest = next(iter(self._hashes))
        return oldest[0], np.array(sorted(self._hashes.pop(oldest)), np.uint64)

    def all_of(self, block_hashes: U64Array, namespace: HashNamespace) -> U64Array:
        """Ledger hashes of all pages with these engine hashes.

        A removal does not say which it means, so it means all.
        """
        if not self._hashes:
            return block_hashes
        others = [other for known in block_hashes.tolist() for other in self._hashes.get((namespace.label, known), ())]
        return np.concatenate((block_hashes, np.array(others, np.uint64))) if others else block_hashes

    def clear(self) -> None:
        """Forget all collisions."""
        self._hashes.clear()
