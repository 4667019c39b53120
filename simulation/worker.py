"""One simulated engine: a real cache and a real publisher around an engine that computes nothing.

Also compares its cache, page by page, with a view of it. That reads both ends and nothing in between.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine_cache import EvictParams, IncLockRefResult, IndexArray, InsertParams, MatchPrefixParams, RadixKey
from indexer.views import View
from kv_events.hashing import U64Array
from kv_events.schema import MEDIA, StorageMedium
from publisher import EventPublisher
from simulation.caches import Found, WorkerCache
from simulation.workload import Request

_NO_HASHES: U64Array = np.zeros(0, np.uint64)


@dataclass(slots=True)
class Running:
    """A request that a worker has admitted."""

    key: RadixKey
    """Whole pages of the prompt and of its output, if that is known."""
    prompt_tokens: int
    found_tokens: int
    """Tokens of the prompt that were in cache, on any tier."""
    rows: IndexArray
    """Device rows for the whole request, fewer if it is longer than the cache."""
    num_owned: int
    """Leading rows that belong to the tree."""
    lock: IncLockRefResult
    """On the end of the part that belongs to the tree."""
    branching_seqlen: int
    """See `Found`. 0: none."""

    @property
    def is_cut(self) -> bool:
        """Whether the request is longer than the worker's capacity, so that only its beginning is cached."""
        return len(self.rows) < len(self.key)


class SimulatedWorker:
    """An engine's cache: `begin` finds, locks, evicts and allocates, `extend` inserts and publishes, `end` unlocks."""

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
        self.most_running = sys.maxsize if self._states is None else self._states.most_running
        """Requests that may run at the same time."""
        self._num_running = 0
        self._publish()

    def _publish(self) -> None:
        self.publisher.publish(self.cache.take_events())
        for group, events in self.cache.take_group_events().items():
            self.group_publishers[group].publish(events)

    def match_length(self, request: Request) -> int:
        """Return the tokens of the prompt that the cache matches now, on device and host."""
        match = self.cache.match_prefix(MatchPrefixParams(RadixKey(request.token_ids, request.extra_key)))
        return len(match.device_indices) + match.host_hit_length

    def serve(self, request: Request) -> Running:
        """Serve a request without delay. Prompt and output are in cache afterwards, as far as they fit."""
        running = self.begin(request, 0)
        assert running is not None, "no other request holds rows"
        self.extend(running, len(running.key))
        self.end(running)
        return running

    def begin(self, request: Request, num_unknown: int) -> Running | None:
        """Take rows for a prompt and its output. Returns None if other requests hold too many.

        num_unknown: tokens that the engine will generate and the request does not contain.
        """
        if self._num_running >= self.most_running:
            return None
        prompt = RadixKey(request.token_ids, request.extra_key)
        found = self._find(prompt)
        num_found = len(found.rows)
        lock = self.cache.inc_lock_ref(found.node)
        key = self._key(request)
        missing = len(key) + self._whole_pages(num_unknown) - num_found
        if self._num_running and missing > self._allocator.available_size() + self.cache.evictable_size():
            self.cache.release(lock)
            return None
        self._num_running += 1
        rows = np.concatenate((found.rows, self._allocate(missing)))
        return Running(key, len(prompt), num_found, rows, num_found, lock, found.branching_seqlen or 0)

    def extend(self, running: Running, num_computed: int) -> None:
        """Insert and publish the whole pages among the first `num_computed` tokens of prompt and output."""
        length = min(self._whole_pages(num_computed), len(running.rows), len(running.key))
        if length > running.num_owned:
            key = running.key[:length]
            self._insert(running, key)
            if self.tiers is not None:
                self.tiers.settle()
            match = self.cache.match_prefix(MatchPrefixParams(key))
            lock = self.cache.inc_lock_ref(match.last_device_node)
            self.cache.release(running.lock)
            running.lock, running.num_owned = lock, len(match.device_indices)
            running.rows[: running.num_owned] = match.device_indices
        self._publish()

    def end(self, running: Running) -> None:
        """Free the rows that are not in the tree, and unlock the others."""
        self._allocator.free(running.rows[running.num_owned :])
        self.cache.release(running.lock)
        self._num_running -= 1

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self.cache.page_size * self.cache.page_size

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

    def _insert(self, running: Running, key: RadixKey) -> None:
        rows, owned = running.rows[: len(key)], running.num_owned
        if self._states is not None:
            # where other prompts branch off, and where the answer begins
            self._states.insert(key, rows, owned, {running.branching_seqlen, self._whole_pages(running.prompt_tokens)})
            return
        taken = self.cache.insert(InsertParams(key, rows))
        # rows of pages that another request has inserted are duplicates
        self._allocator.free(rows[owned : taken.prefix_len])


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
