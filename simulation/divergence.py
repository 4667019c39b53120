"""Page-by-page comparison of views and caches, which reads both ends and nothing in between."""

from __future__ import annotations

import numpy as np

from indexer.views import View
from kv_events.hashing import U64Array
from kv_events.schema import MEDIA, StorageMedium
from simulation.worker import SimulatedWorker


def divergent_pages(worker: SimulatedWorker, view: View | None) -> dict[StorageMedium, int]:
    """Return the number of pages that either the worker or its view holds on a medium, but not both.

    The worker's pages come from a walk of its tree and from its disk, the view's pages from the index. view: None if
    there is no view.
    """
    viewed = _viewed(view)
    found = {}
    for medium in MEDIA:
        held, num_nameless = held_pages(worker, medium)
        found[medium] = len(np.setxor1d(held, viewed[medium])) + num_nameless
    return found


def held_pages(worker: SimulatedWorker, medium: StorageMedium) -> tuple[U64Array, int]:
    """Return the pages that the worker holds, and the number of pages that it holds and has not published."""
    if medium is StorageMedium.DISK and worker.tiers is not None:
        return worker.tiers.on_disk()
    if medium not in (StorageMedium.GPU, StorageMedium.CPU):
        return np.zeros(0, np.uint64), 0
    return np.array([page.sequence_hash for page in worker.cache.iter_resident(medium)], np.uint64), 0


def _viewed(view: View | None) -> dict[StorageMedium, U64Array]:
    held = list(view.index.stream_pages(view.number)) if view is not None else []
    empty = np.zeros(0, np.uint64)
    return {
        medium: np.concatenate([empty, *(part.hashes[part.tiers >> tier & 1 == 1] for part in held)])
        for tier, medium in enumerate(MEDIA)
    }
