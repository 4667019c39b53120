"""One simulated engine: a real cache and a real publisher around an engine that computes nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine_cache import (
    EvictParams,
    IndexArray,
    InsertParams,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    RadixKey,
)
from publisher import EventPublisher
from simulation.requests import Request


class Served(NamedTuple):
    """What became of one request."""

    found_tokens: int
    """Tokens of the prompt that were in cache."""
    is_cut: bool
    """Whether the request was longer than the worker's capacity, so that only its beginning is cached."""


class SimulatedWorker:
    """Serves one request at a time, at once: match, lock, evict, allocate, insert, unlock, publish."""

    def __init__(self, publisher: EventPublisher, capacity_tokens: int, page_size: int) -> None:
        self.publisher = publisher
        self._allocator = PagedTokenToKVPoolAllocator(capacity_tokens, page_size)
        self.cache = RadixCache(page_size=page_size, allocator=self._allocator, enable_kv_cache_events=True)
        publisher.publish(self.cache.take_events())

    def serve(self, request: Request) -> Served:
        """Prompt and output are in cache afterwards, as far as they fit."""
        match = self.cache.match_prefix(MatchPrefixParams(RadixKey(request.token_ids, request.extra_key)))
        key = self._key(request)
        found = len(match.device_indices)
        node = match.last_device_node
        self.cache.inc_lock_ref(node)
        rows = self._allocate(len(key) - found)
        held = np.concatenate((match.device_indices, rows))
        taken = self.cache.insert(InsertParams(key[: len(held)], held))
        # an output that an earlier request brought along is there already: its rows are duplicates
        self._allocator.free(held[found : taken.prefix_len])
        self.cache.dec_lock_ref(node)
        self.publisher.publish(self.cache.take_events())
        return Served(found, is_cut=len(held) < len(key))

    def _key(self, request: Request) -> RadixKey:
        """Whole pages of prompt and output."""
        tokens = request.token_ids
        if len(request.output_tokens):
            tokens = np.concatenate((tokens, request.output_tokens))
        return RadixKey(tokens, request.extra_key).page_aligned(self.cache.page_size)

    def _allocate(self, num_tokens: int) -> IndexArray:
        """Rows for as many of the tokens as can be had; evicts what is not locked."""
        missing = num_tokens - self._allocator.available_size()
        if missing > 0:
            self.cache.evict(EvictParams(missing))
        rows = self._allocator.alloc(min(num_tokens, self._allocator.available_size()))
        assert rows is not None, "no more is asked for than is free"
        return rows
