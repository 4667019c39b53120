"""Whether a view is what it should be, page by page, from both ends and by nothing in between."""

from __future__ import annotations

import numpy as np

from indexer.views import View
from kv_events.hashing import U64Array
from kv_events.schema import MEDIA, StorageMedium
from simulation.worker import SimulatedWorker


def divergent_pages(worker: SimulatedWorker, view: View | None) -> dict[StorageMedium, int]:
    """Pages on each medium that either the worker or the router's view of it holds, but not both.

    The worker's side is a walk of its tree and the content of its disk, the view's side everything the index has for
    the stream. None: no view.
    """
    viewed = _viewed(view)
    found = {}
    for medium in MEDIA:
        held, num_nameless = _held(worker, medium)
        found[medium] = len(np.setxor1d(held, viewed[medium])) + num_nameless
    return found


def _held(worker: SimulatedWorker, medium: StorageMedium) -> tuple[U64Array, int]:
    """Pages that the worker holds, and the number of those that it holds and never told of."""
    if medium is StorageMedium.DISK and worker.tiers is not None:
        return worker.tiers.on_disk()
    if medium not in (StorageMedium.GPU, StorageMedium.CPU):
        return np.zeros(0, np.uint64), 0
    return np.array([page.sequence_hash for page in worker.cache.iter_resident(medium)], np.uint64), 0


def _viewed(view: View | None) -> dict[StorageMedium, U64Array]:
    held = list(view.index.held_pages(view.number)) if view is not None else []
    empty = np.zeros(0, np.uint64)
    return {
        medium: np.concatenate([empty, *(part.hashes[part.tiers >> tier & 1 == 1] for part in held)])
        for tier, medium in enumerate(MEDIA)
    }
