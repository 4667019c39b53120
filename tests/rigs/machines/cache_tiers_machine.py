"""The part of the state machine for the host: transfers in flight, failing copies and stores, nearly full pools."""

import pytest

from engine_cache import Lane, Request, TransferError
from engine_cache.tree.node import iter_nodes
from kv_events.schema import BlockRemoved
from tests.models.cache_oracle import lost_windows, num_usable, pages_along, states_of_windows
from tests.rigs.cache import CPU, EVERYTHING, GPU, NOTHING
from tests.rigs.cache_content import is_pending
from tests.rigs.machines.cache_machine import operation
from tests.rigs.machines.cache_store_machine import StorageMachine, is_stepped

ALL = 10**6
_LANES = (Lane.WRITE, Lane.WRITE, Lane.LOAD, Lane.PREFETCH, Lane.PREFETCH, Lane.PREFETCH, Lane.ARCHIVE, Lane.ARCHIVE)


class TieredCacheMachine(StorageMachine):
    MEDIA = (GPU, CPU)

    @operation(weight=5)
    def insert(self, draw):
        super().insert(draw)
        if self.cache.host.backups.write_policy == "write_through_selective" and draw.random() < 0.6:
            for _ in range(2):  # so that it is backed up
                self.rig.insert(*self.inserted)

    def prompt_to_insert(self, draw):
        if draw.random() > 0.4:
            return self.prompt(draw)
        tokens, extra_key = draw.choice((self.fetched, self.inserted))  # conflicts with a running prefetch
        tokens = tokens[: draw.randrange(len(tokens) + 1)] + [1] * draw.randrange(2) * self.page_size
        return self.noted(tokens, extra_key)

    def restart_empty(self):
        super().restart_empty()
        self.forget_store()

    # --- eviction from the host ---

    @operation()
    def evict_host(self, draw):
        self.cache.evict_host(draw.randrange(9))

    @operation(when=lambda machine: machine.cache.auxiliaries)
    def evict_a_kind_on_the_host(self, draw):
        component, num_rows = draw.choice(self.cache.auxiliaries), draw.randrange(4)
        with_states = [node for node in states_of_windows(self.rig, "host_value") if self.may_leave_the_host(node)]
        free = component.entry.host_pool.available_size()
        freed = self.cache.host.leaves.evict_component(component, num_rows)
        assert component.entry.host_pool.available_size() == free + freed
        assert freed >= num_rows or not any(self.may_go(component, place.node) for place in self.rig.walk())
        assert lost_windows(self.rig, with_states, "host_value") == []

    @operation(weight=2)
    def most_is_in_the_store_only(self, draw):
        self.checked_evict(EVERYTHING)
        self.cache.evict_host(ALL)

    def may_leave_the_host(self, node):
        return all(self.may_go(component, node) for component in self.cache.auxiliaries)

    def may_go(self, component, node):
        """Return whether the node has this kind on the host only, without a lock there."""
        data = component.data(node)
        return data.host_value is not None and data.value is None and data.host_lock_ref == 0

    @operation(weight=4, when=lambda machine: machine.cache.auxiliaries)
    def a_kind_leaves_the_host_between_match_and_load(self, draw):
        self.served.begin(*self.prompt_to_run(draw))
        going = [
            (req, component, step)
            for req, match in self.served.matched.items()
            if match.best_match_node.former_parent is None
            for step in self.rig.up(match.best_match_node)
            for component in self.cache.auxiliaries
            if self.may_go(component, step)
        ]
        if going:
            req, component, node = draw.choice(going)
            component.free_on_host(node)
            self.served.load_back(req)

    # --- loads ---

    @operation(weight=3)
    def load_back(self, draw):
        match = self.checked_match(*self.prompt(draw))
        quota = draw.choice((None, None, 0, 2, 4))
        req = Request("l", [], 0) if "mamba" in self.rig.kinds and draw.random() < 0.5 else None
        is_refused, is_granted = self.verdict(match, quota)
        (rows, node), _, lock = self.rig.load_back(match, mem_quota=quota, req=req)
        assert len(rows) in ([0] if is_refused else [0, match.host_hit_length][is_granted:])
        if self.rig.cls != "himamba":
            assert node is (match.best_match_node if len(rows) else match.last_device_node) or self.rig.cls == "hiradix"
        if len(rows):
            path = [row for step in reversed(list(self.rig.up(node))) for row in step.value]
            assert [*match.device_indices, *rows] == path
            pages = pages_along(self.rig, self.tokens_of(node), node.key.extra_key)
            assert num_usable(self.rig, pages, {"d"}) == len(pages)
        self.cache.release(lock)

    def verdict(self, match, quota):
        """Return whether a load must be refused, and whether it must be granted. It must be granted if it is worthwhile
        and needs no eviction."""
        num_units = sum(len(step.key) for step in self.rig.up(match.best_match_node) if step.value is None)
        window, states = match.swa_host_hit_length, match.mamba_host_hit_length
        is_worth_it = bool(window or states) or num_units >= self.cache.host.load_back_threshold
        is_unlimited = quota is None or (states and not self.variant.quota_covers_states)
        is_wanted = num_units + window + states > 0 and is_worth_it and (is_unlimited or num_units <= quota)
        needed = num_units, 2 * ("mamba" in self.rig.kinds), window  # one state for the tree, one for the request
        return not is_wanted, is_wanted and quota is None and all(map(int.__le__, needed, self.free_rows()))

    def tokens_of(self, node):
        return next(place.prefixes[-1] for place in self.rig.walk() if place.node is node)

    @operation()
    def start_loading(self, draw):
        self.cache.ready_to_load_host_cache()

    # --- the engine ---

    @operation(weight=7, when=is_stepped)
    def step(self, draw):
        self.engine.step(draw.choice(_LANES), draw.choice((0, 0, 0, 1)))

    @operation(weight=4, when=is_stepped)
    def run_lane(self, draw):
        self.rig.run(draw.choice(_LANES))

    @operation(when=is_stepped)
    def step_with_a_failing_write(self, draw):
        self.fail(draw.choice((1, 2, 2)))
        self.engine.step(Lane.WRITE)
        self.fail(0)

    @operation(when=is_stepped)
    def step_with_a_load_that_works_the_second_time(self, draw):
        self.rig.host.load_faults = 1
        self.engine.step(Lane.LOAD)
        self.rig.host.load_faults = 0

    @operation(weight=2, when=lambda machine: is_stepped(machine) and machine.cache.ongoing_load_back)
    def a_load_fails_permanently(self, draw):
        """Make a load fail, so that its device rows are undefined. The cache raises and is reset."""
        if draw.random() < 0.7:
            return
        self.cache.ready_to_load_host_cache()
        self.rig.host.load_faults = 2
        self.rig.run(Lane.LOAD)
        if self.rig.host.load_faults == 0:
            with pytest.raises(TransferError, match="injected load fault"):
                self.cache.check_hicache_events()
            self.restart_empty()
        self.rig.host.load_faults = 0

    @operation(weight=8)
    def check_hicache_events(self, draw):
        """Process finished transfers and check that new pages on the host are being archived."""
        copied, num_skipped = self.rows_on_host(is_copied=True), self.cache.num_skipped_archives
        self.cache.check_hicache_events()
        self.check_events(all_taken=is_stepped(self))
        if is_stepped(self) and self.store is not None and num_skipped == self.cache.num_skipped_archives:
            operations = self.cache.ongoing_backup
            assert copied & self.rows_on_host(is_copied=False) <= set().union(*map(archived_rows, operations))

    @operation()
    def everything_settles(self, draw):
        if draw.random() < 0.3:
            self.settle()

    @operation(when=lambda machine: not is_stepped(machine))
    def copies_will_fail(self, draw):
        """Make one of the next copies fail, on a thread. Only writes may fail twice in a row, so everything settles
        first."""
        self.settle()
        self.rig.host.write_faults, self.rig.host.load_faults = draw.choice((0, 1, 2, 3)), draw.choice((0, 1))

    def settle(self):
        self.rig.settle()
        assert not any((self.cache.ongoing_write_through, self.cache.ongoing_load_back, self.cache.ongoing_backup))
        self.check_events(all_taken=True)
        self.rig.check()
        self.check()
        if not self.cache.ongoing_prefetch:
            nodes = [self.cache.root_node, *iter_nodes(self.cache.root_node)]
            assert not any(self.rig.data(node, kind).host_lock_ref for node in nodes for kind in ("swa", "mamba"))

    # --- what transfers need stays on the host ---

    @operation(weight=4)
    def prefetch(self, draw):
        super().prefetch(draw)
        request = str(self.num_requests)
        if request in self.cache.ongoing_prefetch:
            self.anchored[request] = self.needed_of(self.cache.ongoing_prefetch[request].start_node)

    def needed_of(self, anchor):
        """Return (kind, row) on the host: the node's state, and its window up to the first gap."""
        needed, covered = set(), 0
        for step in self.rig.up(anchor):
            if covered >= self.rig.window or self.rig.data(step, "swa").host_value is None:
                break
            covered += len(step.key)
            if not self.is_copied(step, "swa"):
                needed |= self.rows_of(step, "swa")
        if anchor is not self.cache.root_node and not self.is_copied(anchor, "mamba"):
            needed |= self.rows_of(anchor, "mamba")
        return needed

    def rows_of(self, node, kind):
        """Return (kind, row) of the host rows of one kind."""
        rows = self.rig.data(node, kind).host_value
        return {(kind, int(row)) for row in (NOTHING if rows is None else rows)}

    def rows_on_host(self, *, is_copied):
        """Return (kind, row) of the host rows that are being copied, or of all others."""
        kinds = [kind for kind in ("full", *self.rig.kinds) if kind != "indexer"]
        held = [(place.node, kind) for place in self.rig.walk() for kind in kinds]
        return set().union(*(self.rows_of(*each) for each in held if self.is_copied(*each) is is_copied))

    def is_copied(self, node, kind):
        return is_pending(node) or getattr(self.rig.data(node, kind), "pending_id", None) is not None

    def check(self):
        if is_stepped(self):
            self.rig.check()
        else:
            self.rig.check_bytes()
        self.check_host_references()
        for archive, node in self.cache.ongoing_backup.items():
            assert archived_rows(archive) <= self.rows_above(node)
        for request, prefetch in self.cache.ongoing_prefetch.items():
            if prefetch.start_node.former_parent is None:
                assert self.anchored[request] <= self.rows_above(prefetch.start_node)

    def rows_above(self, node):
        """Return (kind, row) on the host for the node and its ancestors."""
        return set().union(
            *(self.rows_of(step, kind) for step in self.rig.up(node) for kind in ("full", "swa", "mamba"))
        )

    def check_events(self, all_taken=False):
        """all_taken: whether all earlier losses of the store have just been processed."""
        if self.events:
            self.on_host = {self.names.named(prefix)[0] for prefix in self.rig.held(CPU)}
        super().check_events()
        if self.events:
            self.check_store(all_taken)
        elif self.num_stores == 0:
            assert all(node.hash_value is None for node in iter_nodes(self.cache.root_node))

    def check_event(self, event):
        """Check that a page that moves to a slower tier is always on at least one tier."""
        if isinstance(event, BlockRemoved) and event.medium is GPU:
            page = (event.extra_key, *event.block_hashes)
            assert page not in self.on_host or page in self.replay.pages[CPU]

    # --- the end ---

    def teardown(self):
        try:
            super().teardown()
        finally:
            if getattr(self, "store", None) is not None:
                self.store.discard()

    def end(self):
        """Finish everything, evict everything, and check that nothing is left."""
        cache = self.cache
        self.let_go()
        self.settle()
        assert (cache.prefetch_tokens_occupied, cache.protected_size(), cache.ongoing_backup) == (0, 0, {})
        assert all(node.lock_ref == 0 for node in iter_nodes(cache.root_node))
        assert cache.store is None or not cache.store.io.prefetches
        while list(iter_nodes(cache.root_node)):
            assert any(self.checked_evict(EVERYTHING)) or cache.evict_host(ALL)
            self.settle()
        assert self.replay.pages[GPU] == self.replay.pages[CPU] == {}
        self.check_all_free()
        if self.store is not None:
            self.detach()
            self.check_events()

    def let_go(self):
        self.fail(0)
        self.rig.host.load_faults = 0
        super().let_go()
        for request in list(self.cache.ongoing_prefetch):
            self.cache.release_aborted_request(request)


def archived_rows(operation):
    """Return (kind, row) that an archive reads, for pools with their own rows."""
    kinds = [(extra.name.value, extra.host_indices) for extra in operation.extras if extra.host_indices is not None]
    return {(kind, int(row)) for kind, rows in (("full", operation.host_indices), *kinds) for row in rows}
