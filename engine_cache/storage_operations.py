"""What a tree asks of the storage tier: prefetches and archives, and the policy they follow.

Every host page of a prefetch has one owner at any time: the operation, or a release queue, or the tree. `take` and
`end` hand pages over; both sides agree under the operation's lock on which those are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError
from kv_events.schema import BlockStored

STOP_POLICIES = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True, slots=True)
class StoragePolicy:
    """How a cache uses its store. Raises InvalidValueError naming the field."""

    prefetch_threshold: int = 256
    """Units below which a prefetch is not worth it; a page at least."""
    stop: str = "best_effort"
    """When a prefetch is cut short: one of `STOP_POLICIES`."""
    timeout_base_s: float = 2.0
    timeout_per_1024_s: float = 0.1
    """Seconds a 1024 units that the store has."""
    timeout_cap_s: float = 30.0
    batch_pages: int = 128
    archive_share: float = 0.5
    """Share of the host's rows that may wait to be archived; with more, what comes then is not archived."""
    emit_storage_events: bool = False
    """Whether pages in the store are announced like those of other tiers."""

    def __post_init__(self) -> None:
        if self.stop not in STOP_POLICIES:
            raise InvalidValueError("stop", self.stop, f"one of {', '.join(STOP_POLICIES)}")
        for name in ("prefetch_threshold", "batch_pages"):
            if getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "a positive integer")
        if not 0 < self.archive_share <= 1:
            raise InvalidValueError("archive_share", self.archive_share, "above 0 and at most 1")
        for name in ("timeout_base_s", "timeout_per_1024_s", "timeout_cap_s"):
            if getattr(self, name) < 0:
                raise InvalidValueError(name, getattr(self, name), "0 or more")

    def timeout_s(self, hit_units: int) -> float:
        """How long a prefetch of that many units may take."""
        return min(self.timeout_cap_s, self.timeout_base_s + self.timeout_per_1024_s * hit_units / 1024)


class PrefetchOperation:
    """Pages on their way from the store to the host. Begun and taken by the tree, filled by the I/O side."""

    def __init__(
        self,
        req_id: str,
        anchor: TreeNode,
        key: RadixKey,
        last_hash: str | None,
        host_indices: IndexArray,
        extras: Sequence[PoolTransfer] = (),
    ) -> None:
        self.req_id = req_id
        self.anchor = anchor
        self.key = key
        """What is fetched, page-aligned; it begins where the anchor's prefix ends."""
        self.last_hash = last_hash
        self.extras = list(extras)
        """Sidecar state of the end of the prefix, with host rows of its own. The tree's again once `is_over`; who keeps
        the rows sets `host_indices` to None."""
        self.extra_pool_hit_pages: dict[PoolName, int] = {}
        """Pages of each sidecar that were really read."""
        self.extra_pages = 0
        """Pages of sidecars with rows of their own that were asked for, found or not; the I/O side's."""
        self.hashes: list[str] = []
        """Block hashes, one a page."""
        self.keys: list[str] = []
        """Names of the pages in the store."""
        self._began = time.monotonic()
        self._lock = Lock()  # guards all below
        self._rows = host_indices  # those that the operation owns
        self._hit_units: int | None = None
        self._completed_units = 0
        self._terminated = False
        self._ended = False
        self._taken = False

    # the I/O side

    def cut_to_hit(self, hit_units: int) -> IndexArray:
        """The store has no more than this; the rows beyond it, which are the caller's now."""
        with self._lock:
            self._hit_units = hit_units
            if self._taken:  # what is left goes when the operation ends
                return no_indices()
            self._rows, beyond = self._rows[:hit_units], self._rows[hit_units:]
            return beyond

    def next_batch(self, max_units: int) -> tuple[int, IndexArray]:
        """Where the next batch begins, and its rows; no rows when there is nothing left to fetch."""
        with self._lock:
            if self._terminated:
                return self._completed_units, no_indices()
            return self._completed_units, self._rows[self._completed_units : self._completed_units + max_units]

    def advance(self, units: int) -> bool:
        """These are there, too. False if the operation was terminated meanwhile, and then they are not counted."""
        with self._lock:
            if not self._terminated:
                self._completed_units += units
            return not self._terminated

    def end(self) -> IndexArray:
        """The I/O side is through. Rows that did not arrive, which are the caller's now."""
        with self._lock:
            self._terminated = self._ended = True
            kept = 0 if self._taken else self._completed_units
            self._rows, rest = self._rows[:kept], self._rows[kept:]
            return rest

    # the tree's side

    def may_finish(self, policy: StoragePolicy) -> bool:
        """Whether what has arrived may be taken now."""
        with self._lock:
            if self._terminated:
                return True
            if self._completed_units == self._hit_units:
                return False  # sidecar state is still being read, into rows that nobody may free
            if policy.stop == "timeout":
                return time.monotonic() - self._began > policy.timeout_s(self._hit_units or 0)
            return policy.stop == "best_effort"

    def take(self) -> IndexArray:
        """Terminate; the rows that arrived, which are the caller's now."""
        with self._lock:
            self._terminated = self._taken = True
            arrived, self._rows = self._rows[: self._completed_units], self._rows[self._completed_units :]
            return arrived

    @property
    def is_over(self) -> bool:
        """Both sides are through."""
        with self._lock:
            return self._ended and self._taken

    def rows(self) -> IndexArray:
        """What the operation owns at this moment."""
        with self._lock:
            return self._rows.copy()


@dataclass(slots=True, eq=False)
class ArchiveOperation:
    """Pages on their way from the host to the store."""

    node: TreeNode
    """Holds a host reference until the tree has seen the acknowledgement."""
    keys: list[str]
    host_indices: IndexArray
    extras: list[PoolTransfer] = field(default_factory=list)
    events: list[BlockStored] = field(default_factory=list)
    """What to say of each page; empty when storage is not announced."""
    extra_pages: int = 0
    """Pages of sidecars with rows of their own that were handed to the store, taken or not."""
    completed_pages: int = 0
    num_units: int = 0
    """On the host, that wait for the acknowledgement."""


StorageOperation: TypeAlias = ArchiveOperation | PrefetchOperation
