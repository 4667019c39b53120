"""Requests on a `CacheRig` from their match to their end. They may have unaligned lengths, may be aborted, and may end
while a load is in flight."""

import numpy as np

from engine_cache import InitLoadBackParams, Lane, ManualCopyEngine, PoolExhaustedError, Request
from engine_cache.storage.base import PoolName
from tests.models.cache_oracle import num_usable, pages_along
from tests.rigs.cache import NOTHING
from tests.rigs.cache_pools import contents


class Requests:
    """The running requests of a rig. Everything that they compute is determined by their tokens."""

    def __init__(self, rig):
        self.rig, self.cache, self.lines = rig, rig.cache, rig.cache.req_to_token_pool
        self.running = {}  # request -> its initial tokens, some of which may be computed
        self.matched = {}  # request -> its match, until it is loaded back
        self.waiting = {}  # request -> None, until it starts to compute (a dict, because a set has no order)
        rig.served = self

    def begin(self, tokens, extra_key=None):
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
        if "mamba" in self.rig.kinds and self.rig.cls != "himamba":  # there, the best match may end above the state
            has_state = self.rig.data(match.best_match_node, "mamba").value is not None
            assert (req.mamba_cow_src_index is not None) == has_state
        self.running[req], self.matched[req] = tokens, match
        self.waiting[req] = None
        self._continue_from(req, match.last_device_node, match.device_indices, NOTHING)
        if "mamba" in self.rig.kinds and not self.rig.has_extra_buffer and req.mamba_pool_idx is None:
            req.mamba_pool_idx = self.rig.alloc_slot()
            if req.mamba_pool_idx is None:
                self.end(req, is_insert=False)
                return None
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
        self._continue_from(req, node, self._rows(req), rows)
        self.cache.dec_lock_ref(*before)
        num_pages = len(req.token_ids) // self.rig.page_size
        pages = pages_along(self.rig, self.running[req], req.extra_key)[:num_pages]
        assert num_usable(self.rig, pages, {"d"}) == num_pages, "all that the request needs is on the device"

    def _rows(self, req):
        return self.lines.read(req.req_pool_idx, len(req.token_ids))

    def _continue_from(self, req, node, held, fresh):
        """Lock the node and use the rows up to it, which belong to the tree. held, fresh: rows from the match and from
        the load."""
        lock = self.cache.inc_lock_ref(node)
        req.last_node, req.lock_params = lock.node, lock.to_dec_params()
        path = np.concatenate([NOTHING, *(step.value for step in reversed(list(self.rig.up(node))))])
        shared = min(len(held), len(path))
        assert held[:shared].tolist() == path[:shared].tolist()
        assert fresh.tolist() == path[len(path) - len(fresh) :].tolist()
        # of other caches, KV may go beyond the last state, and others may have loaded nodes since the match
        assert len(held) + len(fresh) == len(path) or self.rig.cls != "unified"
        req.cache_protected_len, req.token_ids = len(path), self.running[req][: len(path)]
        self.lines.write(req.req_pool_idx, 0, path)

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
        last = self._rows(req)[have // page * page :][-1:]
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
                self.rig.run(Lane.LOAD)
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
        if not self.rig.has_extra_buffer:  # a page is a token, so the running state is at the end of one
            states.write(req.mamba_pool_idx[: len(prefixes)], contents(req.extra_key, prefixes[-1:], "mamba"))
            return
        if req.mamba_pool_idx is None:
            req.mamba_pool_idx = self.rig.alloc_slot()
        if req.mamba_pool_idx is not None:
            states.write(req.mamba_pool_idx, np.array([-1]))  # not at the end of a whole page: no match may find it
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

    def share(self, req, *, chunked=False):
        self.cache.cache_unfinished_req(req, chunked=chunked)
        assert req.prefix_indices.tolist() == self._rows(req).tolist()

    def end(self, req, *, is_insert=True):
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
        return [self._rows(req)[req.cache_protected_len :] for req in self.running]

    def owned_slots(self):
        slots = [slot for req in self.running for slot in (req.mamba_pool_idx, req.mamba_track_idx)]
        return [slot for slot in slots if slot is not None]
