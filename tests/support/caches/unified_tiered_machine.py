"""State machine of a UnifiedRadixCache with any kinds of state on device and host, and with a store."""

from __future__ import annotations

from engine_cache import EvictParams, Lane
from tests.models.cache_oracle import lost_windows, num_usable, pages_along, states_of_windows
from tests.rigs.cache import NOTHING, CacheRig, is_pending
from tests.rigs.cache_requests import Requests
from tests.support.caches.cache_machine import operation
from tests.support.caches.storage_machine import is_stepped
from tests.support.caches.tiered_machine import EVERYTHING, TieredCacheMachine
from tests.support.caches.unified_machine import UnifiedSteps


class UnifiedCacheMachine(UnifiedSteps, TieredCacheMachine):
    def begin(self, **options):  # type: ignore[override]
        self.anchored = {}  # request -> rows of the start node that its prefetch needs, see `rows_above`
        super().begin(**options)

    def make_rig(self, **options):
        rig = CacheRig("+".join(("unified", *self.KINDS)), **options)
        Requests(rig)
        return rig

    @operation(weight=5)
    def insert(self, draw):
        super().insert(draw)
        if self.cache.host.backups.write_policy == "write_through_selective" and draw.random() < 0.6:
            for _ in range(2):  # so that it is backed up
                self.rig.insert(*self.inserted)

    def prompt_to_insert(self, draw):
        self.inserted = self.prompt(draw)
        if draw.random() < 0.2:  # conflicts with a running prefetch
            self.inserted = self.fetched
            self.seen.update(self.names.prefixes(*self.inserted))
        return self.inserted

    # --- eviction ---------------------------------------------------------------------------------------------------

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
        self.checked_evict(EvictParams(EVERYTHING, EVERYTHING, EVERYTHING))
        self.cache.evict_host(EVERYTHING)

    def may_leave_the_host(self, node):
        return all(self.may_go(component, node) for component in self.cache.auxiliaries)

    def may_go(self, component, node):
        """Return whether the node has this kind on the host only, without a lock there."""
        data = component.data(node)
        return data.host_value is not None and data.value is None and data.host_lock_ref == 0

    @operation(weight=4, when=lambda machine: machine.cache.auxiliaries)
    def a_kind_leaves_the_host_between_match_and_load(self, draw):
        self.rig.served.begin(*self.prompt_to_run(draw))
        going = [
            (req, component, step)
            for req, match in self.rig.served.matched.items()
            if match.best_match_node.former_parent is None
            for step in self.rig.up(match.best_match_node)
            for component in self.cache.auxiliaries
            if self.may_go(component, step)
        ]
        if going:
            req, component, node = draw.choice(going)
            component.free_on_host(node)
            self.rig.served.load_back(req)

    @operation(when=is_stepped)
    def step_with_a_failing_write(self, draw):
        self.fail(draw.choice((1, 2, 2)))
        self.engine.step(Lane.WRITE)
        self.fail(0)

    # --- loads ------------------------------------------------------------------------------------------------------

    @operation(weight=3)
    def load_back(self, draw):
        match = self.checked_match(*self.prompt(draw))
        quota = draw.choice((None, None, 0, 2, 4))
        num_units = sum(len(step.key) for step in self.rig.up(match.best_match_node) if step.value is None)
        is_refused, is_granted = self.verdict(match, num_units, quota)
        (rows, node), _, lock = self.rig.load_back(match, mem_quota=quota)
        assert len(rows) in (
            [0] if is_refused else [match.host_hit_length] if is_granted else [0, match.host_hit_length]
        )
        assert node is (match.best_match_node if len(rows) else match.last_device_node)
        if len(rows):
            path = [row for step in reversed(list(self.rig.up(node))) for row in step.value]
            assert [*match.device_indices, *rows] == path
            pages = pages_along(self.rig, self.tokens_of(node), node.key.extra_key)
            assert num_usable(self.rig, pages, {"d"}) == len(pages)
        self.cache.release(lock)

    def verdict(self, match, num_units, quota):
        """Return whether a load of `num_units` must be refused, and whether it must be granted. It must be granted if
        it is worthwhile and needs no eviction."""
        window, states = match.swa_host_hit_length, match.mamba_host_hit_length
        is_worth_it = bool(window or states) or num_units >= self.cache.host.loads.threshold
        is_wanted = num_units + window + states > 0 and is_worth_it and (quota is None or num_units <= quota)
        free = self.free_rows()
        needed = num_units, 2 * ("mamba" in self.KINDS), window  # one state for the tree, one for the request
        return not is_wanted, is_wanted and quota is None and all(map(int.__le__, needed, free))

    def tokens_of(self, node):
        return next(place.prefixes[-1] for place in self.rig.walk() if place.node is node)

    # --- archives and prefetches ------------------------------------------------------------------------------------

    @operation(weight=8)
    def check_hicache_events(self, draw):
        """Process finished transfers and check that new pages on the host are being archived."""
        copied, num_skipped = self.rows_on_host(is_copied=True), self.cache.num_skipped_archives
        super().check_hicache_events(draw)
        if is_stepped(self) and self.store is not None and num_skipped == self.cache.num_skipped_archives:
            operations = self.cache.ongoing_backup
            assert copied & self.rows_on_host(is_copied=False) <= set().union(*map(archived_rows, operations))

    def rows_on_host(self, *, is_copied):
        """Return (kind, row) of the host rows that are being copied, or of all others."""
        return {
            (kind, int(row))
            for place in self.rig.walk()
            for kind in ("full", *self.KINDS)
            if kind != "indexer" and self.is_copied(place.node, kind) is is_copied
            for row in rows_of(self.rig.data(place.node, kind))
        }

    def is_copied(self, node, kind):
        return is_pending(node) or getattr(self.rig.data(node, kind), "pending_id", None) is not None

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
            needed |= {
                ("swa", int(row)) for row in rows_of(self.rig.data(step, "swa")) if not self.is_copied(step, "swa")
            }
        if anchor is not self.cache.root_node and not self.is_copied(anchor, "mamba"):
            needed |= {("mamba", int(row)) for row in rows_of(self.rig.data(anchor, "mamba"))}
        return needed

    def check_host_references(self):
        """Check also that nothing of the other kinds that a transfer needs is removed."""
        super().check_host_references()
        for archive, node in self.cache.ongoing_backup.items():
            assert archived_rows(archive) <= self.rows_above(node)
        for request, prefetch in self.cache.ongoing_prefetch.items():
            if prefetch.start_node.former_parent is None:
                assert self.anchored[request] <= self.rows_above(prefetch.start_node)

    def rows_above(self, node):
        """Return (kind, row) on the host for the node and its ancestors."""
        kinds = "full", "swa", "mamba"
        return {
            (kind, int(row))
            for step in self.rig.up(node)
            for kind in kinds
            for row in rows_of(self.rig.data(step, kind))
        }

    # --- the end ----------------------------------------------------------------------------------------------------

    def restart_empty(self):
        super().restart_empty()
        self.forget_requests()

    def let_go(self):
        self.fail(0)
        self.release_all()
        super().let_go()

    def end(self):
        super().end()
        assert not self.cache.ongoing_backup


def rows_of(data):
    """Return the host rows."""
    return NOTHING if data.host_value is None else data.host_value


def archived_rows(operation):
    """Return (kind, row) that an archive reads, for pools with their own rows."""
    kinds = [(extra.name.value, extra.host_indices) for extra in operation.extras if extra.host_indices is not None]
    return {(kind, int(row)) for kind, rows in (("full", operation.host_indices), *kinds) for row in rows}
