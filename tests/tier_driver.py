"""What random tests do to a cache with tiers, and what must hold after each step.

Works on a `tier_rig.Rig` and an engine that is stepped by hand.
"""

from __future__ import annotations

from page_names import block_name, sequence_hash
from tier_rig import MemoryStorage, Replay

from engine_cache import EvictParams, InitLoadBackParams, StoragePolicy
from engine_cache.node import iter_nodes
from kv_events.schema import AllBlocksCleared, BlockStored, StorageMedium


class Driver:
    """A cache, a store and an engine that is stepped by hand, with what is needed to check them."""

    def __init__(self, rig, *, events=True, stop="best_effort", storage=True):
        self.rig, self.events = rig, events
        self.page_size, self.is_bigram = rig.page_size, rig.is_bigram
        self.cache, self.engine = rig.cache, rig.engine
        self.write_policy = rig.cache.write_policy
        self.store = MemoryStorage() if storage else None
        if self.store is not None:
            policy = StoragePolicy(prefetch_threshold=1, stop=stop, batch_pages=2, emit_storage_events=True)
            assert self.cache.attach_storage_backend(self.store, policy)[0]
        self.replay = Replay()
        self.locks = []
        self.num_requests = 0

    def tokens(self, prompt):
        pages, tail, _ = prompt
        return [page for page in pages for _ in range(self.page_size)] + [1] * tail

    # --- operations ---

    def insert(self, prompt, chunked=False, priority=0):
        tokens, extra_key = self.tokens(prompt), prompt[2]
        known = sum((extra_key, raw) in self.rig.held(StorageMedium.GPU) for raw in self.rig.prefixes(tokens))
        result = self.rig.insert(tokens, extra_key, chunked=chunked, priority=priority)
        if result is not None:  # what the allocation evicted was not known any more
            assert result.prefix_len <= known * self.page_size

    def match(self, prompt):
        tokens, extra_key = self.tokens(prompt), prompt[2]
        on_device = self.rig.held(StorageMedium.GPU)
        prefixes = self.rig.prefixes(tokens)
        match = self.rig.match(tokens, extra_key)
        assert len(match.device_indices) == self.page_size * sum((extra_key, raw) in on_device for raw in prefixes)
        return match

    def lock(self, prompt):
        node = self.match(prompt).last_device_node
        self.cache.inc_lock_ref(node)
        self.locks.append(node)

    def unlock(self, position):
        self.cache.dec_lock_ref(self.locks.pop(position % len(self.locks)))

    def evict(self, num_tokens, write_faults):
        free = self.rig.pool.available_size()
        self.rig.host.write_faults = write_faults
        result = self.cache.evict(EvictParams(num_tokens))
        self.rig.host.write_faults = 0
        assert self.rig.pool.available_size() - free == result.num_tokens_evicted

    def load_back(self, prompt, quota):
        match = self.match(prompt)
        if match.best_match_node.value is not None:
            return
        locked = match.last_device_node
        self.cache.inc_lock_ref(locked)
        rows, node = self.cache.init_load_back(
            InitLoadBackParams(match.best_match_node, match.host_hit_length, mem_quota=quota)
        )
        assert len(rows) in (0, match.host_hit_length)
        assert node is (match.best_match_node if len(rows) else match.last_device_node)
        if quota is not None:
            assert len(rows) <= quota
        self.cache.dec_lock_ref(locked)

    def step(self, lane, position, write_faults=0, load_faults=0):
        self.rig.host.write_faults, self.rig.host.load_faults = write_faults, load_faults
        self.engine.step(lane, position)
        self.rig.host.write_faults = self.rig.host.load_faults = 0

    def prefetch(self, prompt):
        match = self.match(prompt)
        anchor = match.last_host_node
        start, node = 0, anchor
        while node is not self.cache.root_node:
            start, node = start + len(node.key), node.parent
        self.num_requests += 1
        tokens = self.tokens(prompt)[start:]
        self.cache.prefetch_from_storage(str(self.num_requests), anchor, tokens, extra_key=prompt[2])

    def progress(self, position):
        request = list(self.cache.ongoing_prefetch)[position % len(self.cache.ongoing_prefetch)]
        if self.cache.check_prefetch_progress(request):
            assert request not in self.cache.ongoing_prefetch
            assert self.cache.pop_prefetch_loaded_tokens(request) % self.page_size == 0

    def abort(self, position):
        self.cache.release_aborted_request(
            list(self.cache.ongoing_prefetch)[position % len(self.cache.ongoing_prefetch)]
        )

    def reset(self):
        self.cache.reset()
        self.rig.pool.clear()
        self.locks = []

    # --- what holds after each ---

    def check(self):
        self.rig.check()
        if self.events:
            self.check_events()
        else:
            assert self.cache.kv_event_queue == []
            if self.store is None:
                assert all(node.hash_value is None for node in iter_nodes(self.cache.root_node))

    def check_events(self):
        on_host = self.named(StorageMedium.CPU)
        for event in self.cache.take_events():
            self.check_event(event, on_host)
            self.replay.apply(event)
        for medium in (StorageMedium.GPU, StorageMedium.CPU):
            assert self.replay.pages[medium] == self.named(medium)
        announced = {(event.extra_key, *event.block_hashes) for event in self.cache._announced.values()}
        assert self.replay.pages[StorageMedium.DISK].keys() == announced

    def check_event(self, event, on_host):
        """Parents come first, and a page that moves down is never on no tier."""
        if isinstance(event, AllBlocksCleared) or event.medium is StorageMedium.DISK:
            return
        is_prefix = self.write_policy != "write_back" or event.medium is StorageMedium.GPU
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == event.block_size == self.page_size
            assert not is_prefix or self.replay.has_parent(event)
        elif event.medium is StorageMedium.GPU:
            page = (event.extra_key, *event.block_hashes)
            assert page not in on_host or page in self.replay.pages[StorageMedium.CPU]

    def named(self, medium):
        """The pages on a tier as `Replay` should have them."""
        return {
            (extra_key, self.name(raw)): (
                self.name(raw[: -self.page_size]),
                sequence_hash(raw, self.page_size, self.is_bigram, extra_key),
            )
            for extra_key, raw in self.rig.held(medium)
        }

    def name(self, raw):
        return block_name(raw, self.page_size, self.is_bigram) if len(raw) > self.is_bigram else None
