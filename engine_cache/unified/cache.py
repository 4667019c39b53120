"""UnifiedRadixCache: one prefix cache for every kind of state, on one tier or on three.

    root ── A ── B* ── C°'     KV makes the nodes; beside it each kind has its own data at some of them
                               (*: on the device, °: on the host;  ': KV on the host only)

KV moves as in `HiRadixCache`; what the other kinds hold comes and goes with it, one operation, all or nothing. What
they may do alone (be evicted, be restored) is no event. Where a match may end is for all kinds to say together: start
at `match_prefix`, then `insert`; eviction, locks and transfers of the other kinds are in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from engine_cache.base import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from engine_cache.options import RadixOptions
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.pools.swa_allocator import SWATokenToKVPoolAllocator
from engine_cache.tiers.host_tier import live_prefix
from engine_cache.transfer import HiCacheController
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray
from engine_cache.unified.checks import check_unified_cache
from engine_cache.unified.component import AuxiliaryComponent, TreeComponent
from engine_cache.unified.full import FullComponent
from engine_cache.unified.mamba import MambaComponent
from engine_cache.unified.match import MatchedPath, num_accepted
from engine_cache.unified.node import ComponentType, UnifiedNode, unified
from engine_cache.unified.requests import UnifiedRequests
from engine_cache.unified.transfers import UnifiedTransfers
from kv_events.errors import InvalidValueError


class UnifiedRadixCache(UnifiedRequests, UnifiedTransfers):
    """A radix tree over pages of KV and whatever else its components hold.

    components: the kinds of state beside Full KV, each once; they belong to this cache from now on. allocator: owner of
    the device rows; with SWA its component's. The rest is as in `RadixCache`. Without `init_hicache` there is one tier,
    the device. The cache must be reset after a TransferError.
    """

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator | SWATokenToKVPoolAllocator,
        components: Sequence[AuxiliaryComponent] = (),
        **options: Unpack[RadixOptions],
    ) -> None:
        self.components: tuple[TreeComponent, ...] = (FullComponent(), *components)
        self.auxiliaries = tuple(components)
        self.event_groups = tuple(component.event_group for component in components)
        kinds = [component.kind for component in self.components]
        if len(set(kinds)) != len(kinds):
            raise InvalidValueError("components", [kind.name for kind in kinds], "each kind once, FULL not named")
        has_swa_rows = isinstance(allocator, SWATokenToKVPoolAllocator)
        if has_swa_rows != (ComponentType.SWA in kinds):
            raise InvalidValueError(
                "allocator", type(allocator).__name__, "one with SWA rows exactly for an SWA component"
            )
        self.token_allocator = allocator
        self._mamba = next((component for component in components if isinstance(component, MambaComponent)), None)
        if self._mamba is not None:
            self.mamba_allocator, self.mamba_pool = self._mamba.allocator, self._mamba.state_pool
            self.enable_mamba_extra_buffer = self._mamba.enable_extra_buffer
        full = allocator.full if isinstance(allocator, SWATokenToKVPoolAllocator) else allocator
        super().__init__(page_size=page_size, allocator=full, **options)
        for component in self.components:
            component.attach(self)

    def init_hicache(
        self, controller: HiCacheController, write_policy: str = "write_through", load_back_threshold: int = 10
    ) -> None:
        """Put a host tier behind the cache, once and before anything is cached.

        controller: moves KV and, as its sidecars, all that the components hold; its device allocators must be theirs.
        write_policy, load_back_threshold: as in `HiRadixCache`.
        """
        if self.cache_controller is not None or self.root_node.children:
            raise InvalidValueError("controller", controller, "the first one, before anything is cached")
        for component in self.auxiliaries:
            entry = controller.entry(component.pool)
            if entry.device_allocator is not component.device_allocator:
                raise InvalidValueError("device_allocator", entry.device_allocator, f"that of {component.pool.value}")
        assert self.allocator is not None
        self._init_host_tier(controller, self.allocator, self.page_size, write_policy, load_back_threshold)
        self.cache_controller = controller
        for component in self.auxiliaries:
            entry = controller.entry(component.pool)
            entry.host_evict_fn = self.evictor_on_host(component)
            entry.device_evict_fn = self.evictor(component)

    def reset(self) -> None:
        for component in self.auxiliaries:
            component.reset()
        super().reset()

    def component(self, kind: ComponentType) -> AuxiliaryComponent:
        """The component of an auxiliary kind. Raises InvalidValueError if the cache has none of it."""
        for component in self.auxiliaries:
            if component.kind is kind:
                return component
        raise InvalidValueError("kind", kind.name, f"one of {[component.kind.name for component in self.auxiliaries]}")

    def check(self, request_indices: IndexArray | None = None, request_slots: IndexArray | None = None) -> None:
        """Recount every invariant of tree, components, tiers and pools; exact between two operations, save for
        prefetches that another thread is working on. Raises CacheStateError with both figures of the first that fails.

        request_indices, request_slots: full rows, and slots of states, that running requests own besides the tree's;
        given, those of the allocators must add up.
        """
        check_unified_cache(self, request_indices, request_slots)

    def sanity_check(self) -> None:
        """`check` of what the tree alone can tell."""
        self.check()

    # --- match ------------------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix at whose end every kind has what it needs: on any tier (`best_match_node`), and on the
        device (`last_device_node`, up to which `device_indices` go).

        With `cow_mamba`, raises PoolExhaustedError if the request has no slot and none can be freed for it.
        """
        key, _ = self._whole_pages(params.key, None)
        path, _ = self._descend(key)
        matched = self._find_ends([unified(node) for node in live_prefix(path)])
        self._touch(list(matched.best()))
        best, device = self._last(matched.best()), self._last(matched.on_device())
        rows = self._device_rows(list(matched.on_device()))
        result = MatchResult(rows, device, best, best)
        for component in self.components:
            result = component.finalize_match_result(result, matched, params)
        if params.req is not None:
            params.req.swa_host_hit_length = result.swa_host_hit_length
            params.req.mamba_host_hit_length = result.mamba_host_hit_length
        return result

    def _find_ends(self, nodes: list[UnifiedNode]) -> MatchedPath:
        on_device = num_accepted(
            nodes, [each.create_match_validator(match_device_only=True) for each in self.components]
        )
        if self.cache_controller is None:
            return MatchedPath(nodes, on_device, on_device)
        return MatchedPath(
            nodes, num_accepted(nodes, [each.create_match_validator() for each in self.components]), on_device
        )

    def _is_usable(self, node: TreeNode) -> bool:
        if node.former_parent is not None:
            return False
        path = [unified(step) for step in reversed(self._path_to_root(node))]
        return self._find_ends(path).num_best == len(path)

    def _last(self, nodes: list[UnifiedNode]) -> TreeNode:
        return nodes[-1] if nodes else self.root_node

    def _touch(self, path: list[TreeNode]) -> None:
        super()._touch(path)
        for component in self.auxiliaries:
            component.touch([unified(node) for node in path])

    def _touch_on_insert(self, node: TreeNode) -> None:
        super()._touch([node])
        for component in self.auxiliaries:
            component.touch_on_insert(unified(node))

    # --- insert -----------------------------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Take over the rows of those pages that are not on the device yet, and what the components can use.

        Frees the duplicates among the rows behind `prev_prefix_len`, and the rows of a leaf that would be of no use.
        `prefix_len` counts all units that were in the tree, on whichever tier. Raises InvalidValueError unless there is
        a row for each unit, and what each component needs; with states the key must be whole pages.
        """
        if self.disable:
            return InsertResult(0, mamba_exist=True)
        key, value = self._whole_pages(params.key, params.value)
        if value is None or (self._mamba is not None and len(value) != len(key)):
            rows = 0 if value is None else len(value)
            raise InvalidValueError("value", f"{rows} rows", f"one for each of {len(key)} units in whole pages")
        if not len(key):
            return InsertResult(0, mamba_exist=True)
        value = value[: len(key)]
        params = params._replace(key=key, value=value)
        for component in self.auxiliaries:
            component.check_insert(params)
        return self._insert(key, value, params)

    def _insert(self, key: RadixKey, value: IndexArray, params: InsertParams) -> InsertResult:
        path, prefix_len = self._descend(key, touch=True)
        for node in path:  # before a component cuts one, of which both parts are used
            self._raise_use(node, params)
        self._insert_overlap(path, value, params)
        total_len = len(key)
        if prefix_len < total_len and any(
            each.should_skip_leaf_creation(total_len, params) for each in self.auxiliaries
        ):
            self._free(value[max(prefix_len, params.prev_prefix_len) :])
            total_len, is_taken = prefix_len, False
        else:
            if prefix_len < total_len:
                path.append(self._insert_leaf(path, key, value, prefix_len, params))
            end = unified(path[-1])
            is_taken = self._finish_insert(end, params)
        end_of_path = path[-1] if path else self.root_node
        for node in reversed(self._path_to_root(end_of_path)):  # at last, since a backup takes along what is there
            self._back_up_if_due(node, params)
        return InsertResult(prefix_len, total_len, mamba_exist=not is_taken)

    def _insert_overlap(self, path: list[TreeNode], value: IndexArray, params: InsertParams) -> None:
        """Nodes that are on the device keep their rows, the others take theirs over."""
        start = 0
        for node in map(unified, path):
            end = start + len(node.key)
            if node.value is None:
                self._put_on_device(node, value[start:end])
                for component in self.auxiliaries:
                    component.recover_after_unevict(node, start, params)
            else:
                for component in self.auxiliaries:
                    component.update_on_overlap(node, start, value[start:end], params)
                self._free(value[max(start, params.prev_prefix_len) : end])
            start = end

    def _insert_leaf(
        self, path: list[TreeNode], key: RadixKey, value: IndexArray, start: int, params: InsertParams
    ) -> TreeNode:
        leaf = self._add_leaf(path[-1] if path else self.root_node, key, value, start, params.priority)
        for component in self.auxiliaries:
            component.recover_after_unevict(unified(leaf), start, params)
        self._raise_use(leaf, params)  # what a component has cut off above it begins without a hit
        return leaf

    def _finish_insert(self, end: UnifiedNode, params: InsertParams) -> bool:
        taken = [component.finish_insert(end, params) for component in self.auxiliaries]
        return all(taken)

    def split(self, node: UnifiedNode, split_len: int) -> None:
        """Put a new node above `node` that takes its first units, whole pages of them."""
        self._split_node(node, split_len)

    def _split_node(self, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(child, split_len)
        for component in self.auxiliaries:
            component.redistribute_on_split(unified(upper), unified(child), split_len)
        self._split_auxiliary_backups(unified(upper), unified(child))
        return upper

    def _new_node(self, key: RadixKey, value: IndexArray | None, parent: TreeNode | None, priority: int) -> TreeNode:
        return UnifiedNode(next(self._node_ids), key, value, parent, next(self._clock), priority)

    def _free(self, indices: IndexArray) -> None:
        if len(indices):
            self.token_allocator.free(indices)
