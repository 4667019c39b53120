"""Operations of the storage tier: prefetches, archives and the policy they follow.

Every host page of a prefetch has one owner at any time: the operation, until the tree takes it.
"""

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError, check_positive
from kv_events.schema import BlockStored

STOP_POLICIES = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True, slots=True)
class StoragePolicy:
    """How a cache uses its storage backend. Raises InvalidValueError naming an invalid field."""

    prefetch_threshold: int = 256
    """Units below which nothing is prefetched; at least one page."""
    stop: str = "best_effort"
    """When a prefetch is ended early: one of `STOP_POLICIES`."""
    timeout_base_s: float = 2.0
    timeout_per_1024_s: float = 0.1
    """Seconds per 1024 units that the backend holds."""
    timeout_cap_s: float = 30.0
    batch_pages: int = 128
    archive_share: float = 0.5
    """Share of the host rows that may wait to be archived. Beyond it, further nodes are not archived."""
    emit_storage_events: bool = False
    """Whether events are recorded for pages in storage."""

    def __post_init__(self) -> None:
        if self.stop not in STOP_POLICIES:
            raise InvalidValueError("stop", self.stop, f"one of {', '.join(STOP_POLICIES)}")
        check_positive(prefetch_threshold=self.prefetch_threshold, batch_pages=self.batch_pages)
        if not 0 < self.archive_share <= 1:
            raise InvalidValueError("archive_share", self.archive_share, "above 0 and at most 1")
        for name in ("timeout_base_s", "timeout_per_1024_s", "timeout_cap_s"):
            if getattr(self, name) < 0:
                raise InvalidValueError(name, getattr(self, name), "0 or more")

    def timeout_s(self, hit_units: int) -> float:
        return min(self.timeout_cap_s, self.timeout_base_s + self.timeout_per_1024_s * hit_units / 1024)


@dataclass(eq=False)
class PrefetchOperation:
    """Pages being read from storage to the host. The tree starts and ends it; the I/O side fills the rows."""

    req_id: str
    start_node: TreeNode
    key: RadixKey
    """The units to fetch, page-aligned. They start where the start node's prefix ends."""
    last_hash: str | None
    _rows: IndexArray
    """Host rows that the operation owns."""
    extras: list[PoolTransfer] = field(default_factory=list)
    """Transfers of sidecars, with host rows. They belong to the tree again once `is_over`. Setting `host_indices` to
    None keeps the rows from being freed."""
    extra_pool_hit_pages: Counter[PoolName] = field(default_factory=Counter)
    """Pages of each sidecar that were read."""
    hashes: list[str] = field(default_factory=list)
    """Block hashes, one per page."""
    keys: list[str] = field(default_factory=list)
    """Storage keys, one per page."""
    hit_units: int | None = None
    """Units that the backend holds. None before the lookup, or if there are too few."""
    held: ExitStack = field(default_factory=ExitStack)
    """Protects the data that the operation needs at the start node. Closed by the tree."""
    _began: float = field(default_factory=lambda: time.monotonic())
    _lock: Lock = field(default_factory=Lock)  # guards _rows and the fields below
    _unused: list[IndexArray] = field(default_factory=list)  # rows without a page, see `take_unused`
    _completed_units: int = 0
    _terminated: bool = False
    _ended: bool = False
    _taken: bool = False

    # the I/O side

    def cut_to_hit(self, hit_units: int) -> None:
        """Shorten the operation to the units that the backend holds."""
        with self._lock:
            self.hit_units = hit_units
            if not self._taken:
                self._keep(hit_units)

    def _keep(self, num_units: int) -> None:
        self._rows, unused = self._rows[:num_units], self._rows[num_units:]
        self._unused.append(unused)

    def next_batch(self, max_units: int) -> IndexArray:
        """Return the rows of the next batch, which are empty if no KV is left to fetch."""
        with self._lock:
            end = 0 if self._terminated else self._completed_units + max_units
            return self._rows[self._completed_units : end]

    def advance(self, units: int) -> bool:
        """Count units that have arrived. False, without counting them, if the operation was terminated."""
        with self._lock:
            if not self._terminated:
                self._completed_units += units
            return not self._terminated

    def end(self) -> None:
        """End the I/O side, which uses no row afterwards."""
        with self._lock:
            self._terminated = self._ended = True
            self._keep(0 if self._taken else self._completed_units)

    # the tree's side

    def may_finish(self, policy: StoragePolicy) -> bool:
        """Return whether the tree may receive the rows that have arrived."""
        with self._lock:
            if self._terminated:
                return True
            if self._completed_units == self.hit_units:
                return False  # sidecars are still being read into their rows
            if policy.stop == "timeout":
                return time.monotonic() - self._began > policy.timeout_s(self.hit_units or 0)
            return policy.stop == "best_effort"

    def take(self) -> IndexArray:
        """Terminate the operation. Return the rows that have arrived to the caller."""
        with self._lock:
            self._terminated = self._taken = True
            arrived, self._rows = self._rows[: self._completed_units], self._rows[self._completed_units :]
            return arrived

    def take_unused(self) -> IndexArray:
        """Return the rows of pages that did not and will not arrive to the caller."""
        with self._lock:
            unused, self._unused = self._unused, []
            return np.concatenate([no_indices(), *unused])

    @property
    def is_revoked(self) -> bool:
        """Whether the operation has ended because the backend held too few pages."""
        with self._lock:
            return self._ended and self.hit_units is None and not self._taken

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._ended and self._taken

    def rows(self) -> IndexArray:
        """Return a copy of the rows that the operation owns now."""
        with self._lock:
            return np.concatenate([self._rows, *self._unused])


@dataclass(slots=True, eq=False)
class ArchiveOperation:
    """Pages being written from the host to storage."""

    node: TreeNode
    keys: list[str]
    host_indices: IndexArray
    extras: list[PoolTransfer] = field(default_factory=list)
    events: list[BlockStored] = field(default_factory=list)
    """The store event of each page; empty without storage events."""
    completed_pages: int = 0
    num_units: int = 0
    """Units on the host that wait for the acknowledgement."""
    held: ExitStack = field(default_factory=ExitStack)
    """Protects the host copy of the node until the tree has processed the acknowledgement."""
