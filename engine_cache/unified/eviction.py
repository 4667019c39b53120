"""Eviction and locks of a unified tree: several kinds of state, each with its own order of use.

A leaf loses everything. A node that others hang below keeps its KV, and one kind that is evicted there takes along the
kinds that are of no use without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine_cache.base import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
)
from engine_cache.errors import CacheStateError
from engine_cache.storage.base import PoolName
from engine_cache.tiers.storage_tier import StorageTier
from engine_cache.tree.node import TreeNode
from engine_cache.unified.component import AuxiliaryComponent
from engine_cache.unified.node import UnifiedNode, unified
from kv_events.errors import InvalidValueError


class UnifiedEviction(StorageTier):
    """What leaves a tier, and what may not."""

    auxiliaries: tuple[AuxiliaryComponent, ...]

    # --- device -----------------------------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least `num_tokens` units of KV, and as many rows of each other kind as wanted, those that went with
        KV included, as far as unlocked nodes hold them."""
        wanted = {PoolName.SWA: params.swa_num_tokens, PoolName.MAMBA: params.mamba_num}
        full, before = self._evictable_size, {each.pool: each.device_size for each in self.auxiliaries}
        self._evict_leaves(params.num_tokens)
        for each in self.auxiliaries:
            gone = before[each.pool] - each.device_size
            self.evict_component(each, wanted.get(each.pool, 0) - gone)
        freed = {each.pool: before[each.pool] - each.device_size for each in self.auxiliaries}
        return EvictResult(full - self._evictable_size, freed.get(PoolName.MAMBA, 0), freed.get(PoolName.SWA, 0))

    def evictor(self, component: AuxiliaryComponent) -> Callable[[int], object]:
        """`evict_component` of one kind."""
        return partial(self.evict_component, component)

    def evict_component(self, component: AuxiliaryComponent, num_rows: int) -> int:
        """Free so many device rows of one kind, least recently used first, and their number: of a leaf all it has, of
        another node this kind and those that are of no use without it, which is no event."""
        before = component.device_size
        node = component.device_lru_list.oldest()
        while node is not None and before - component.device_size < num_rows:
            following = component.device_lru_list.newer_than(node)  # stays: only the node itself is touched
            if node in self.evictable_leaves:
                self._evict_device_leaf(node)
            elif all(each.data(node).lock_ref == 0 for each in self._going_with(component)):
                for each in self._going_with(component):
                    each.free_on_device(node)
            node = following
        return before - component.device_size

    def _going_with(self, component: AuxiliaryComponent) -> list[AuxiliaryComponent]:
        return [each for each in self.auxiliaries if each.eviction_priority <= component.eviction_priority]

    def _evict_device_leaf(self, leaf: TreeNode) -> None:
        """Evict a leaf with all it has on the device; it stays if a write-back finds no room on the host."""
        waiting: dict[TreeNode, None] = {}
        self._evict_or_wait(leaf, waiting)
        self._evict_waiting(waiting)

    def _evict_backuped(self, node: TreeNode) -> None:
        self._free_auxiliaries(unified(node))
        super()._evict_backuped(node)

    def _delete_leaf(self, leaf: TreeNode) -> TreeNode:
        self._free_auxiliaries(unified(leaf))
        return super()._delete_leaf(leaf)

    def _free_auxiliaries(self, node: UnifiedNode) -> None:
        for component in self.auxiliaries:  # before KV, whose rows name those of SWA
            component.free_on_device(node)

    # --- host -------------------------------------------------------------------------------------------------------

    def evictor_on_host(self, component: AuxiliaryComponent) -> Callable[[int], object]:
        """`evict_component_on_host` of one kind."""
        return partial(self.evict_component_on_host, component)

    def evict_component_on_host(self, component: AuxiliaryComponent, num_rows: int) -> int:
        """The same for host rows of nodes that have this kind on the host only."""
        pool = component.entry.host_pool
        before = pool.available_size()
        node = component.host_lru_list.oldest()
        while node is not None and pool.available_size() - before < num_rows:
            following = component.host_lru_list.newer_than(node)
            if node in self.evictable_host_leaves:
                self._evict_host_leaf(node)
            else:
                for each in self._going_with(component):
                    if node in each.host_lru_list:
                        each.free_on_host(node)
            node = following
        return pool.available_size() - before

    def _evict_host_leaf(self, leaf: TreeNode) -> TreeNode:
        for component in self.auxiliaries:
            component.free_on_host(unified(leaf))
        return super()._evict_host_leaf(leaf)

    # --- locks ------------------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Forbid eviction of the KV of the node and everything above it, and of what else a request that goes on from
        the node needs. A node that is not on the device stands for the KV of the first one above it that is."""
        held = node
        while held.value is None:
            if held.parent is None:
                raise CacheStateError(f"node {node.id} does not hang below a node on the device")
            held = held.parent
        full = super().inc_lock_ref(held)
        taken = ((component.kind, component.acquire(unified(node))) for component in self.auxiliaries)
        return full._replace(tickets=tuple((int(kind), ticket) for kind, ticket in taken if ticket is not None))

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Take one `inc_lock_ref` back. node, params: `node` and `to_dec_params()` of its result; without the latter
        the release could take what another lock holds. Raises CacheStateError if there is no lock, or for a node of
        another tree, and InvalidValueError without `params` in a tree with several kinds."""
        if params is None and self.auxiliaries:
            raise InvalidValueError("params", None, "to_dec_params() of the lock that is released")
        if params is not None:
            for component in self.auxiliaries:
                ticket = dict(params.tickets).get(component.kind)
                if ticket is not None:
                    component.release(unified(node), ticket)
        return super().dec_lock_ref(node)

    def release(self, lock: IncLockRefResult) -> DecLockRefResult:
        return self.dec_lock_ref(lock.node, lock.to_dec_params())

    def _hold_on_host(self, node: UnifiedNode) -> DecLockRefParams:
        """Forbid eviction of what a transfer at a node needs of the kinds beside KV; what `_let_go_on_host` wants to
        know. KV has `host_ref_counter`."""
        held = ((each.kind, each.acquire_host(node)) for each in self.auxiliaries)
        return DecLockRefParams(tuple((int(kind), ticket) for kind, ticket in held if ticket is not None))

    def _let_go_on_host(self, node: UnifiedNode, params: DecLockRefParams) -> None:
        """Take one `_hold_on_host` back."""
        tickets = dict(params.tickets)
        for component in self.auxiliaries:
            if component.kind in tickets:
                component.release_host(node, tickets[component.kind])
