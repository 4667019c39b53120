"""A MambaRadixCache with its pools, without torch."""

import numpy as np

from engine_cache import (
    InsertParams,
    MambaRadixCache,
    MambaSlotAllocator,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixKey,
    ReqToTokenPool,
)
from kv_events.schema import BlockStored

NOTHING = np.empty(0, np.int64)


class Rig:
    """A cache with its pools. The default page size is 1."""

    def __init__(self, page_size=1, slots=8, **options):
        self.pool = PagedTokenToKVPoolAllocator(64 * page_size, page_size)
        self.slots = MambaSlotAllocator(slots)
        self.lines = ReqToTokenPool(4, 128)
        self.cache = MambaRadixCache(
            page_size=page_size,
            mamba_allocator=self.slots,
            allocator=self.pool,
            req_to_token_pool=self.lines,
            enable_mamba_extra_buffer=page_size > 1,
            mamba_cache_chunk_size=2,
            **options,
        )

    def insert(self, tokens, **params):
        """Insert new rows and a new slot. Frees the slot if the tree already has a state there."""
        slot = self.slots.alloc(1)
        rows = self.pool.alloc(len(tokens))
        result = self.cache.insert(InsertParams(RadixKey(tokens), rows, mamba_value=slot, **params))
        if result.mamba_exist:
            self.slots.free(slot)
        return result

    def match(self, tokens, **params):
        return self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens), **params))

    def node(self, tokens):
        """Return the node that ends where `tokens` end, with or without a state."""
        node = self.cache.root_node
        while tokens:
            node = node.children[RadixKey(tokens).page_key(self.cache.page_size)]
            tokens = tokens[len(node.key) :]
        return node

    def lock(self, tokens):
        node = self.match(tokens).last_device_node
        self.cache.inc_lock_ref(node)
        return node


def tokens_of(recorded):
    return [(type(event), event.token_ids) if isinstance(event, BlockStored) else type(event) for event in recorded]
