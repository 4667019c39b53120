"""Requests on a `UnifiedRig` from their match to their end, and the operations of a machine that run them.

Requests may have unaligned lengths, may be aborted, and may end while a load is in flight."""

from __future__ import annotations

import numpy as np

from engine_cache import EvictParams, InitLoadBackParams, Lane, ManualCopyEngine, PoolExhaustedError, Request
from engine_cache.storage.base import PoolName
from kv_events.schema import StorageMedium
from tests.support.caches.cache_machine import operation
from tests.support.caches.unified_oracle import num_usable, pages_along
from tests.support.caches.unified_rig import NOTHING, contents


class Requests:
    """The running requests of a rig. Everything that they compute is determined by their tokens."""

    def __init__(self, rig):
        self.rig, self.cache, self.lines = rig, rig.cache, rig.cache.req_to_token_pool
        self.running = {}  # request -> its initial tokens, some of which may be computed
        self.matched = {}  # request -> its match, until it is loaded back
        self.waiting = {}  # request -> None, until it starts to compute (a dict, because a set has no order)
        rig.served = self

    def begin(self, tokens, extra_key):
        """Match and lock. Returns the request, or None if there is no room for it."""
        line = self.lines.alloc()
        if line is None:
            return None
        req = Request(f"q{line}", [], line, extra_key)
        try:
            match = self.rig.match(tokens, extra_key, cow_mamba="mamba" in self.rig.kinds, req=req)
        except PoolExhaustedError:
            assert self.rig.slots.available_size() == 0
            self.lines.free(line)
            return None
        self._continue_from(req, match.last_device_node)
        self.running[req], self.matched[req] = tokens, match
        self.waiting[req] = None
        self._extend(req, match.device_indices)
        self._check_prefix(req)
        return req

    def load_back(self, req, mem_quota=None):
        """Load back what the match found on the host, if it is still there. The request ends if there is no room."""
        match = self.matched.pop(req)
        if self.cache.cache_controller is None:
            return
        params = InitLoadBackParams(match.best_match_node, match.host_hit_length, mem_quota, req)
        try:
            rows, node = self.cache.init_load_back(params)
        except PoolExhaustedError:
            assert self.rig.slots.available_size() == 0
            self.end(req, is_insert=False)
            return
        before = req.last_node, req.lock_params
        self._continue_from(req, node)
        self.cache.dec_lock_ref(*before)
        self._extend(req, rows)
        self._check_prefix(req)

    def _check_prefix(self, req):
        """Check that everything the request needs of its prefix is on the device."""
        num_pages = len(req.token_ids) // self.rig.page_size
        pages = pages_along(self.rig, self.running[req], req.extra_key)[:num_pages]
        assert num_usable(self.rig, pages, {"d"}) == num_pages

    def _extend(self, req, rows):
        """Append these rows, which belong to the tree, to the prefix of the request."""
        start, end = req.cache_protected_len, req.cache_protected_len + len(rows)
        req.cache_protected_len, req.token_ids = end, self.running[req][:end]
        self.lines.write(req.req_pool_idx, start, rows)

    def _continue_from(self, req, node):
        lock = self.cache.inc_lock_ref(node)
        req.last_node, req.lock_params = lock.node, lock.to_dec_params()

    def compute(self, req, tokens):
        """Allocate rows for these tokens, or for more of the prompt. Returns False if there is no room."""
        rig, page = self.rig, self.rig.page_size
        if req in self.matched:
            self.load_back(req)
        if req not in self.running:
            return False
        if req in self.waiting:
            self._take_state(req)
        tokens, have = max(tokens, req.token_ids, key=len), len(req.token_ids)
        fresh = rig.alloc((-(-len(tokens) // page) - -(-have // page)) * page)
        if fresh is None:
            return False
        last = self.lines.read(req.req_pool_idx, have)[have // page * page :][-1:]
        rest = last + np.arange(1, -have % page + 1) if len(last) else NOTHING
        self.lines.write(req.req_pool_idx, have, np.concatenate((rest, fresh))[: len(tokens) - have])
        req.token_ids = tokens
        self._write_pages(req)
        if "mamba" in rig.kinds:
            self._write_states(req)
        return True

    def _take_state(self, req):
        """Check the state of the request, which was loaded or is copied from the tree now."""
        del self.waiting[req]
        self._wait_for_loads()
        if req.token_ids and "mamba" in self.rig.kinds:
            states, have = self.rig.pools[PoolName.MAMBA], len(req.token_ids) // self.rig.page_size
            if req.mamba_cow_src_index is not None:
                states.device.copy_from(req.mamba_cow_src_index, req.mamba_pool_idx)
                req.mamba_cow_src_index = None
            prefix = self.rig.prefixes(self.running[req])[have - 1]
            states.check_device(req.mamba_pool_idx, contents(req.extra_key, [prefix], "mamba"))

    def _wait_for_loads(self):
        """Wait layer by layer, as an engine does. The cache processes the results later."""
        if self.cache.cache_controller is not None:
            self.cache.ready_to_load_host_cache()
            if isinstance(self.rig.engine, ManualCopyEngine):
                while self.rig.engine.step(Lane.LOAD):
                    pass
            else:
                self.rig.engine.drain()

    def _write_pages(self, req):
        prefixes, first = self.rig.prefixes(req.token_ids), req.cache_protected_len // self.rig.page_size
        rows = self.lines.read(req.req_pool_idx, len(prefixes) * self.rig.page_size)
        if len(prefixes) > first:
            self.rig.compute(rows[req.cache_protected_len :], req.extra_key, prefixes[first:])

    def _write_states(self, req):
        """Write the running state and, if possible, one at the end of the last whole page."""
        states, prefixes = self.rig.pools[PoolName.MAMBA], self.rig.prefixes(req.token_ids)
        if req.mamba_pool_idx is None:
            req.mamba_pool_idx = self.rig.alloc_slot()
        if req.mamba_pool_idx is not None:
            states.device.rows[req.mamba_pool_idx] = -1  # not at the end of a whole page: no match may find it
        if req.mamba_track_idx is None:
            req.mamba_track_idx = self.rig.alloc_slot()
        if prefixes and req.mamba_track_idx is not None:
            states.write(req.mamba_track_idx, contents(req.extra_key, prefixes[-1:], "mamba"))
            req.mamba_last_track_seqlen = len(prefixes) * self.rig.page_size

    def slide_window(self, req):
        """Free the SWA rows that no later token will read."""
        page, length = self.rig.page_size, len(req.token_ids)
        end = max(0, length - self.rig.window) // page * page
        start = max(req.swa_evicted_seqlen, req.cache_protected_len)
        if end > start:
            self.rig.swa.free_swa(self.lines.read(req.req_pool_idx, end)[start:])
            req.swa_evicted_seqlen = end

    def share(self, req, *, chunked):
        self.cache.cache_unfinished_req(req, chunked=chunked)
        assert req.prefix_indices.tolist() == self.lines.read(req.req_pool_idx, len(req.token_ids)).tolist()

    def end(self, req, *, is_insert):
        self.running.pop(req)
        self.matched.pop(req, None)
        self.waiting.pop(req, None)
        self.cache.cache_finished_req(req, is_insert=is_insert)
        self.lines.free(req.req_pool_idx)

    def forget(self):
        for req in self.running:
            self.lines.free(req.req_pool_idx)
        for kept in (self.running, self.matched, self.waiting):
            kept.clear()

    def owned_rows(self):
        """Return the rows that belong to requests and not to the tree."""
        return [self.lines.read(r.req_pool_idx, len(r.token_ids))[r.cache_protected_len :] for r in self.running]

    def owned_slots(self):
        slots = [slot for req in self.running for slot in (req.mamba_pool_idx, req.mamba_track_idx)]
        return [slot for slot in slots if slot is not None]


class RequestSteps:
    """Operations of a machine that has `rig`."""

    def one_request(self, draw):
        return draw.choice(list(self.rig.served.running))

    @operation(weight=4)
    def begin_a_request(self, draw):
        req = self.rig.served.begin(*self.prompt_to_run(draw))
        if req is not None and draw.random() < 0.6:
            self.load_the_match_of(req, draw)

    def prompt_to_run(self, draw):
        """Draw a prompt. Most of them have been evicted from the device."""
        away = sorted(self.rig.held(StorageMedium.CPU) - self.rig.held(StorageMedium.GPU), key=str)
        if away and draw.random() < 0.7:
            extra_key, raw = draw.choice(away)
            tokens = [*raw, *[1] * draw.randrange(4)]
            self.seen.update(self.names.prefixes(tokens, extra_key))
            return tokens, extra_key
        return self.prompt(draw)

    @operation()
    def most_leaves_the_device(self, draw):
        self.checked_evict(EvictParams(*draw.choice(((1000, 1000, 1000), (4, 0, 0), (0, 4, 0)))))

    @operation(weight=2, when=lambda machine: machine.rig.served.matched)
    def load_an_old_match(self, draw):
        self.load_the_match_of(draw.choice(list(self.rig.served.matched)), draw)

    def load_the_match_of(self, req, draw):
        self.rig.served.load_back(req, draw.choice((None, None, None, 0, 2)))

    @operation(weight=4, when=lambda machine: machine.rig.served.running)
    def compute_some(self, draw):
        req = self.one_request(draw)
        tokens = self.rig.served.running[req]
        more = draw.randrange(len(tokens) + 1)
        self.rig.served.compute(req, tokens[:more])
        if self.rig.swa and req in self.rig.served.running and draw.random() < 0.5:
            self.rig.served.slide_window(req)

    @operation(weight=2, when=lambda machine: machine.rig.served.running)
    def share_what_is_computed(self, draw):
        self.rig.served.share(self.one_request(draw), chunked=draw.random() < 0.3)

    @operation(weight=3, when=lambda machine: machine.rig.served.running)
    def end_a_request(self, draw):
        self.rig.served.end(self.one_request(draw), is_insert=draw.random() < 0.7)

    @operation(weight=2, when=lambda machine: machine.rig.served.waiting)
    def abort_before_it_runs(self, draw):
        self.rig.served.end(draw.choice(list(self.rig.served.waiting)), is_insert=False)
