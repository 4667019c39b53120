"""How long pages stay on the device of each rank, by the index of `kvsight audit`. It follows one page in 256."""

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from analysis.audit.residency import BatchTime, ResidencyIndex, median_lifetime, milliseconds
from analysis.kernels.residency import NUM_LIFETIMES
from indexer.views import View
from kv_events.codec import DecodedBatch, RemovedPages, StoredPages
from kv_events.hashing import U64Array
from kv_events.schema import AllBlocksCleared, SnapshotBegin
from kv_events.streams import StreamId

_MASK = np.uint64(255)
"""Pages whose hash has none of these bits are followed."""
_CAPACITY = 2**16
_MOST_COUNTED = 1024
"""Removed pages of a rank, after which earlier ones count half."""
_MAX_NUMBER = 2**16
_DEVICE = 0


@dataclass(slots=True)
class _Rank:
    number: int
    """In the index."""
    removed: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_LIFETIMES, np.int64))
    """[NUM_LIFETIMES] removed pages by the time that they were held."""
    mark: int = 0
    is_resync: bool = False
    """Whether pages are named that were stored before, nobody knows when."""


class PageLifetimes:
    """Follows the stores and removals of all ranks."""

    def __init__(self) -> None:
        self._index = ResidencyIndex(0.0, _CAPACITY)
        self._ranks: dict[StreamId, _Rank] = {}
        self._num_ranks = 0

    def note(self, view: View, batch: DecodedBatch) -> None:
        """Note a batch that was applied."""
        rank = self._ranks.get(view.stream)
        if rank is None:
            rank = self._ranks[view.stream] = _Rank(self._num_ranks % _MAX_NUMBER)
            self._num_ranks += 1
        for step in batch.steps:
            if isinstance(step, (StoredPages, RemovedPages)):  # a union would be made anew each time
                if step.medium == _DEVICE and 0 in step.hashes.tobytes()[::8]:  # a tenth of the time of numpy
                    picked = step.hashes[step.hashes & _MASK == 0]
                    self._note_pages(rank, picked, batch.timestamp, isinstance(step, StoredPages))
            elif isinstance(step, AllBlocksCleared):
                self._index.sweep(rank.number)
            elif isinstance(step, SnapshotBegin):
                rank.mark, rank.is_resync = rank.mark + 1, True
            else:
                self._index.sweep(rank.number, rank.mark)
        rank.is_resync = view.marks is not None  # a resync that was cut off has no end

    def median_s(self, streams: Iterable[StreamId]) -> float | None:
        """Return the seconds for which half of the pages that ranks removed were held at most; None without any."""
        known = [self._ranks[stream].removed for stream in streams if stream in self._ranks]
        return median_lifetime(np.sum(known, axis=0)) if known else None

    def keep(self, streams: Set[StreamId]) -> Iterator[None]:
        """Forget all other ranks, in slices."""
        for stream in self._ranks.keys() - streams:
            self._index.sweep(self._ranks.pop(stream).number)
            yield

    def _note_pages(self, rank: _Rank, hashes: U64Array, time_s: float, is_store: bool) -> None:
        at = BatchTime(milliseconds(time_s), 0 if rank.is_resync else 1)
        if is_store:
            each_alone, no_parents = np.full(len(hashes), 255, np.uint8), np.zeros(len(hashes), np.uint64)
            pages = StoredPages(_DEVICE, hashes, hashes, each_alone, no_parents)
            self._index.store(rank.number, 0, pages, at, rank.mark, is_resync=True)
            return
        self._index.remove(rank.number, RemovedPages(_DEVICE, hashes, hashes), at)
        rank.removed += self._index.take_lifetimes(_DEVICE)
        if rank.removed.sum() > _MOST_COUNTED:
            rank.removed //= 2
