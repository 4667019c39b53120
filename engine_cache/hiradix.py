"""HiRadixCache: the prefix cache of two tiers, device and host, with an optional storage backend behind them.

    root ── A ──┬── B ── C'      A, B: on the device; ' : evicted, on the host only
                └── D'           nodes on the device always form a prefix of the tree

`insert` adds pages, `evict` moves them to the host or deletes them, and `init_load_back` loads them back. Copies run
concurrently: the scheduler calls `ready_to_load_host_cache` before a batch and `check_hicache_events` between batches.
"""

from __future__ import annotations

from typing import Unpack

from engine_cache.cache import RadixOptions, TreeCache
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.rules import RADIX
from engine_cache.tiers.transfer import HiCacheController


class HiRadixCache(TreeCache):
    """A radix tree over device and host pages.

    controller: moves the pages; its KV device allocator must be `allocator`. write_policy: `write_through` (copy at the
    first hit), `write_through_selective` (copy at the second hit) or `write_back` (copy at eviction).
    load_back_threshold: minimum number of units of a load-back. The other options are those of `TreeCache`. The cache
    must be reset after a TransferError.
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
        super().__init__(page_size=page_size, allocator=allocator, rules=RADIX, **options)
        self._add_host_tier(controller, write_policy, load_back_threshold)
