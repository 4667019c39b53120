"""One simulated engine: a real cache and a real publisher around an engine that computes nothing.

Also compares its cache, page by page, with a view of it. That reads both ends and nothing in between.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from engine_cache import EvictParams, IndexArray, InsertParams, MatchPrefixParams, RadixKey
from indexer.views import View
from kv_events.hashing import U64Array
from kv_events.schema import MEDIA, StorageMedium
from publisher import EventPublisher
from simulation.caches import Found, WorkerCache
from simulation.workload import Request

_NO_HASHES: U64Array = np.zeros(0, np.uint64)


class Served(NamedTuple):
    """The result of one request."""

    found_tokens: int
    """Tokens of the prompt that were in cache, on any tier."""
    is_cut: bool
    """Whether the request was longer than the worker's capacity, so that only its beginning is cached."""


class SimulatedWorker:
    """Serves one request at a time, without delay: find, lock, evict, allocate, insert, unlock, publish."""

    def __init__(
        self,
        publisher: EventPublisher,
        cache: WorkerCache,
        group_publishers: Mapping[str, EventPublisher] | None = None,
    ) -> None:
        """group_publishers: one for each group whose events the cache records."""
        self.publisher = publisher
        self.group_publishers = group_publishers or {}
        self.cache, self._allocator, self.tiers, self._states = cache
        self._publish()

    def _publish(self) -> None:
        self.publisher.publish(self.cache.take_events())
        for group, events in self.cache.take_group_events().items():
            self.group_publishers[group].publish(events)

    def match_length(self, request: Request) -> int:
        """Return the tokens of the prompt that the cache matches now, on device and host."""
        match = self.cache.match_prefix(MatchPrefixParams(RadixKey(request.token_ids, request.extra_key)))
        return len(match.device_indices) + match.host_hit_length

    def serve(self, request: Request) -> Served:
        """Serve a request. Prompt and output are in cache afterwards, as far as they fit."""
        key = self._key(request)
        found = self._find(RadixKey(request.token_ids, request.extra_key))
        num_found = len(found.rows)
        self.cache.inc_lock_ref(found.node)
        held = np.concatenate((found.rows, self._allocate(len(key) - num_found)))
        self._insert(key[: len(held)], held, found, len(request.token_ids))
        if self.tiers is not None:
            self.tiers.settle()
        self.cache.dec_lock_ref(found.node)
        self._publish()
        return Served(num_found, is_cut=len(held) < len(key))

    def _key(self, request: Request) -> RadixKey:
        tokens = request.token_ids
        if len(request.output_tokens):
            tokens = np.concatenate((tokens, request.output_tokens))
        return RadixKey(tokens, request.extra_key).page_aligned(self.cache.page_size)

    def _find(self, prompt: RadixKey) -> Found:
        if self.tiers is not None:
            return self.tiers.find(prompt)
        match = self.cache.match_prefix(MatchPrefixParams(prompt))
        return Found(match.device_indices, match.last_device_node, match.mamba_branching_seqlen)

    def _allocate(self, num_tokens: int) -> IndexArray:
        missing = num_tokens - self._allocator.available_size()
        if missing > 0:
            self.cache.evict(EvictParams(missing))
        rows = self._allocator.alloc(min(num_tokens, self._allocator.available_size()))
        assert rows is not None, "the request fits into the free rows"
        return rows

    def _insert(self, key: RadixKey, held: IndexArray, found: Found, prompt_len: int) -> None:
        num_found = len(found.rows)
        if self._states is not None:
            # where other prompts branch off, and where the answer begins
            ends = {found.branching_seqlen or 0, prompt_len // self.cache.page_size * self.cache.page_size}
            self._states.insert(key, held, num_found, ends)
            return
        taken = self.cache.insert(InsertParams(key, held))
        # rows of an output that an earlier request has inserted are duplicates
        self._allocator.free(held[num_found : taken.prefix_len])


def divergent_pages(worker: SimulatedWorker, view: View | None) -> dict[StorageMedium, int]:
    """Return the number of pages that either the worker or its view holds on a medium, but not both.

    The worker's pages come from a walk of its tree and from its disk, the view's pages from the index. view: None if
    there is no view.
    """
    found = {}
    viewed = list(view.index.stream_pages(view.number)) if view is not None else []
    for tier, medium in enumerate(MEDIA):
        held, num_nameless = held_pages(worker, medium)
        seen = [part.hashes[part.tiers >> tier & 1 == 1] for part in viewed]
        found[medium] = len(np.setxor1d(held, np.concatenate([_NO_HASHES, *seen]))) + num_nameless
    return found


def held_pages(worker: SimulatedWorker, medium: StorageMedium) -> tuple[U64Array, int]:
    """Return the pages that the worker holds, and the number of pages that it holds and has not published."""
    if medium is StorageMedium.DISK and worker.tiers is not None:
        return worker.tiers.on_disk()
    if medium not in (StorageMedium.GPU, StorageMedium.CPU):
        return _NO_HASHES, 0
    return np.array([page.sequence_hash for page in worker.cache.iter_resident(medium)], np.uint64), 0
