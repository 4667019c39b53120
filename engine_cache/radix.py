"""RadixCache: the prefix cache with one tier, the device."""

from __future__ import annotations

from typing import Unpack

from engine_cache.cache import RadixOptions, TreeCache
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.rules import RADIX


class RadixCache(TreeCache):
    """A radix tree over device pages. The options are those of `TreeCache`."""

    def __init__(
        self, *, page_size: int, allocator: PagedTokenToKVPoolAllocator | None = None, **options: Unpack[RadixOptions]
    ) -> None:
        super().__init__(page_size=page_size, allocator=allocator, rules=RADIX, **options)
