"""HiRadixCache: the prefix cache of two tiers, device and host, with a store behind them.

    root ── A ──┬── B ── C'      A, B: on the device; ' : evicted, on the host only
                └── D'           what is on the device is a prefix of what is in the tree

`insert` fills, `evict` demotes or deletes, `init_load_back` brings back. Copies run meanwhile: whoever drives the cache
calls `ready_to_load_host_cache` before a batch and `check_hicache_events` between batches.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np

from engine_cache.base import (
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from engine_cache.checks import check_host_tier
from engine_cache.options import RadixOptions
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.tiers.host_tier import live_prefix
from engine_cache.tiers.storage_tier import StorageTier
from engine_cache.transfer import HiCacheController
from engine_cache.types import IndexArray


class HiRadixCache(StorageTier):
    """A radix tree over device and host pages.

    controller: moves the pages; its KV device allocator must be `allocator`. write_policy: `write_through` (a copy at
    the first hit), `write_through_selective` (at the second) or `write_back` (when evicted). load_back_threshold: units
    below which nothing is loaded back. The rest is as in `RadixCache`. The cache must be reset after a TransferError.
    """

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator,
        controller: HiCacheController,
        write_policy: str = "write_through",
        load_back_threshold: int = 10,
        **options: Unpack[RadixOptions],
    ) -> None:
        self._init_host_tier(controller, allocator, page_size, write_policy, load_back_threshold)
        super().__init__(page_size=page_size, allocator=allocator, **options)

    def check(self, request_indices: IndexArray | None = None) -> None:
        """Recount every invariant of tree, tiers and pools; exact between two operations, save for prefetches that
        another thread is working on. Raises CacheStateError with both figures of the first that fails."""
        super().check(request_indices)
        check_host_tier(self)

    # --- match and insert -------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key, _ = self._whole_pages(params.key, None)
        path, _ = self._descend(key)
        used = live_prefix(path)
        self._touch(used)
        return self._match_result(used)

    def insert(self, params: InsertParams) -> InsertResult:
        """Evicted nodes on the way take over their part of `value`, too: it does not count in `prefix_len`."""
        if self.disable:
            return InsertResult(0)
        key, value = self._whole_pages(params.key, params.value)
        rows = key.raw.astype(np.int64) if value is None else value
        path, total = self._descend(key)
        self._touch(path)
        prefix_len = sum(len(node.key) for node in path if node.value is not None)
        hit = [node for node in path if node.value is not None]
        start = prefix_len
        for node in path[len(hit) :]:
            node.priority = max(node.priority, params.priority)
            self._put_on_device(node, rows[start : start + len(node.key)])
            start += len(node.key)
        if total < len(key):
            parent = path[-1] if path else self.root_node
            hit.append(self._add_leaf(parent, key, rows, total, params.priority))
        for node in hit:  # at last, since a backup may evict what is on the host only
            self._count_hit(node, params)
        return InsertResult(prefix_len, len(key))

    # --- eviction ---------------------------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        return EvictResult(self._evict_leaves(params.num_tokens))
