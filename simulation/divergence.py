"""Whether a view is what it should be, page by page, from both ends and by nothing in between."""

from __future__ import annotations

import numpy as np

from engine_cache import RadixCache
from indexer.views import View
from kv_events.hashing import U64Array
from kv_events.schema import MEDIUM_INDEX, StorageMedium

_ON_GPU = 1 << MEDIUM_INDEX[StorageMedium.GPU]


def divergent_pages(cache: RadixCache, view: View | None) -> int:
    """Pages that either the cache or the router's view of it holds, but not both; pages on a wrong tier count, too.

    The cache side is a walk of its tree, the view side everything the index has for the stream. None: no view.
    """
    cached = np.array([page.sequence_hash for page in cache.iter_resident(StorageMedium.GPU)], np.uint64)
    viewed, num_elsewhere = _viewed(view) if view is not None else (np.zeros(0, np.uint64), 0)
    return len(np.setxor1d(cached, viewed)) + num_elsewhere


def _viewed(view: View) -> tuple[U64Array, int]:
    """Pages that the view holds on GPU, and the number of those it holds on other tiers."""
    hashes, num_elsewhere = [np.zeros(0, np.uint64)], 0
    for held in view.index.held_pages(view.number):
        hashes.append(held.hashes[held.tiers & _ON_GPU != 0])
        num_elsewhere += int(np.count_nonzero(held.tiers & ~np.uint8(_ON_GPU)))
    return np.concatenate(hashes), num_elsewhere
