"""Invariants of a radix tree, recounted from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine_cache.errors import CacheStateError
from engine_cache.storage.base import PoolName
from engine_cache.tree.node import MambaNode, TreeNode, iter_nodes
from engine_cache.types import IndexArray, no_indices

if TYPE_CHECKING:
    from engine_cache.himamba import HiMambaRadixCache
    from engine_cache.mamba import MambaRadixCache
    from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
    from engine_cache.radix import RadixCache
    from engine_cache.tiers.storage_tier import StorageTier
    from engine_cache.tree.lru import LruList


def check_radix_cache(cache: RadixCache, request_indices: IndexArray | None) -> None:
    """Links, shapes, locks, sizes, leaf set and pages of a `RadixCache`; see `RadixCache.check`."""
    nodes = list(iter_nodes(cache.root_node))
    for node in (cache.root_node, *nodes):
        _check_links(node, cache.page_size)
    for node in nodes:
        _check_shape(node, cache.page_size)
        _check_locks(node, cache.root_node)
    on_device = [node for node in nodes if node.value is not None]
    _check_sizes(cache, on_device)
    _check_leaves(cache, on_device)
    rows = np.concatenate([node.value for node in nodes if node.value is not None] or [no_indices()])
    require(len(np.unique(rows)), len(rows), "distinct rows in the tree, rows in the tree")
    if cache.allocator is not None:
        check_pages(cache.allocator, rows, request_indices)


def check_mamba_states(cache: MambaRadixCache, request_slots: IndexArray | None) -> None:
    """States, their locks and sizes, both lists and the slots of a `MambaRadixCache`; see `MambaRadixCache.check`."""
    nodes = [node for node in iter_nodes(cache.root_node) if isinstance(node, MambaNode)]
    with_state = [node for node in nodes if node.mamba_value is not None]
    for node in nodes:
        require(0 <= node.mamba_lock_ref <= node.lock_ref, True, f"node {node.id}: 0 <= mamba_lock_ref <= lock_ref")
    protected = sum(node.mamba_lock_ref > 0 for node in with_state)
    require(cache.mamba_protected_size(), protected, "protected states, locked nodes with one")
    require(cache.mamba_evictable_size(), len(with_state) - protected, "evictable states, unlocked nodes with one")
    _check_lru_list(cache.mamba_lru_list, with_state, "mamba")
    slots = np.concatenate([node.mamba_value for node in nodes if node.mamba_value is not None] or [no_indices()])
    require(len(slots), len(with_state), "slots, states")
    check_pages(cache.mamba_allocator, slots, request_slots)


def check_no_tombstone_leaf(cache: MambaRadixCache) -> None:
    """A leaf without a state is of no use, so it is only there while a lock holds it."""
    for node in iter_nodes(cache.root_node):
        if isinstance(node, MambaNode) and not node.children and node.mamba_value is None:
            require(node.mamba_lock_ref > 0, True, f"node {node.id}: a leaf without a state is locked")


def check_host_states(cache: HiMambaRadixCache) -> None:
    """States on the host: where they may be, their list, references and slots; see `HiMambaRadixCache.check`."""
    nodes = [node for node in iter_nodes(cache.root_node) if isinstance(node, MambaNode)]
    for node in nodes:
        require(node.mamba_value is None or node.value is not None, True, f"node {node.id}: state, KV on the device")
        require(
            node.mamba_host_value is None or node.host_value is not None, True, f"node {node.id}: state, KV on the host"
        )
        held = node.host_mamba_ref_counter
        require(held >= 0, True, f"node {node.id}: host_mamba_ref_counter {held} >= 0")
        if node.value is None and held:
            require(node.host_ref_counter > 0, True, f"node {node.id}: who holds the host state holds the KV, too")
    backups = cache.ongoing_write_through.items()
    pending = {node.id: node.mamba_pending_id for node in nodes if node.mamba_pending_id is not None}
    copied = {backup.node.id: ack_id for ack_id, backup in backups if not (backup.publish or backup.discarded)}
    require(pending, copied, "states on their way to the host alone, backups of nothing else")
    free_to_go = [n for n in nodes if n.mamba_host_value is not None and n.host_mamba_ref_counter == 0]
    cache.host_mamba_lru_list.check()
    listed = {node.id for node in cache.host_mamba_lru_list}
    require(listed, {node.id for node in free_to_go}, "host states listed, those that nobody holds")
    tree = [node.mamba_host_value for node in nodes if node.mamba_host_value is not None]
    copies = discarded_rows(cache, PoolName.MAMBA)
    prefetches = [] if cache.storage is None else cache.storage.owned_extras(PoolName.MAMBA)
    pool = cache.controller.entry(PoolName.MAMBA).host_pool
    slots = np.concatenate([pool.free_pages(), *tree, *copies, *prefetches])
    what = f"host slots of {len(tree)} nodes, {len(copies)} dropped copies and {len(prefetches)} prefetches"
    require(len(np.unique(slots)), len(slots), f"{what}: distinct, all")
    require(len(slots), pool.size, f"{what} and free slots, slots of the pool")


def check_host_tier(cache: StorageTier) -> None:
    """Residency, pending backups, host leaves and host pages of a cache with a host tier; see `HiRadixCache.check`."""
    cache.controller.require_loads()
    nodes = list(iter_nodes(cache.root_node))
    for node in nodes:
        _check_tiers(node, cache)
    leaves = {
        node.id
        for node in nodes
        if node.value is None
        and node.host_ref_counter == 0
        and all(child.host_value is None for child in node.children.values())
    }
    require({node.id for node in cache.evictable_host_leaves}, leaves, "evictable host leaves kept, found")
    cache.evictable_host_leaves.check()
    _check_pending(cache, nodes)
    _check_host_pages(cache, nodes)
    occupied = sum(len(operation.key) for operation in cache.ongoing_prefetch.values())
    require(cache.prefetch_tokens_occupied, occupied, "units occupied by prefetches, units of those in flight")


def _check_tiers(node: TreeNode, cache: StorageTier) -> None:
    parent = node.parent
    assert parent is not None
    require(node.host_ref_counter >= 0, True, f"node {node.id}: host_ref_counter {node.host_ref_counter} >= 0")
    require(node.value is None and node.host_value is None, False, f"node {node.id} is on no tier")
    if node.value is not None:
        require(parent.value is not None, True, f"node {node.id} is on the device, its parent {parent.id}, too")
    if node.host_value is not None and cache.write_policy != "write_back" and parent is not cache.root_node:
        require(parent.host_value is not None, True, f"node {node.id} is on the host, its parent {parent.id}, too")


def _check_pending(cache: StorageTier, nodes: list[TreeNode]) -> None:
    pending = {node.id: node.write_through_pending_id for node in nodes if node.write_through_pending_id is not None}
    published = [(node.id, ack_id) for ack_id, backup in cache.ongoing_write_through.items() for node in backup.publish]
    require(sorted(published), sorted(pending.items()), "nodes to publish, pending nodes")
    for ack_id, backup in cache.ongoing_write_through.items():
        require(backup.node.lock_ref > 0, backup.is_locked, f"node {backup.node.id} of backup {ack_id} is locked")
    for node in cache.ongoing_load_back.values():
        require(node.value is not None and node.lock_ref > 0, True, f"loading node {node.id} is locked on the device")


def _check_host_pages(cache: StorageTier, nodes: list[TreeNode]) -> None:
    pool = cache.controller.kv.host_pool
    tree = [node.host_value for node in nodes if node.host_value is not None]
    copies = discarded_rows(cache, PoolName.KV)
    storage = [] if cache.storage is None else cache.storage.owned_rows()
    used = np.concatenate([no_indices(), *tree, *copies, *storage])[:: pool.page_size] // pool.page_size
    pages = np.concatenate((pool.free_pages(), used))
    what = f"host pages of {len(tree)} nodes, {len(copies)} dropped copies and {len(storage)} prefetches"
    require(len(np.unique(pages)), len(pages), f"{what}: distinct, all")
    require(len(pages), pool.size // pool.page_size, f"{what} and free pages, pages of the pool")


def discarded_rows(cache: StorageTier, pool: PoolName) -> list[IndexArray]:
    return [
        rows for backup in cache.ongoing_write_through.values() for owner, rows in backup.discarded if owner is pool
    ]


def _check_lru_list(listed: LruList[MambaNode], expected: list[MambaNode], name: str) -> None:
    listed.check()
    require({node.id for node in listed}, {node.id for node in expected}, f"{name} list: nodes listed, in the tree")
    times = [node.last_access_time for node in listed]
    require(times, sorted(times), f"{name} list: times of use, in order")


def require(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise CacheStateError(f"{what}: {found} != {expected}")


def _check_links(node: TreeNode, page_size: int) -> None:
    """Child and parent agree, and a child's dictionary key is its first page; so no two children share one."""
    for key, child in node.children.items():
        require(child.parent is node, True, f"node {child.id} names node {node.id} its parent")
        require(child.key.page_key(page_size), key, f"first page of node {child.id}, its dictionary key")
    on_device = sum(child.value is not None for child in node.children.values())
    require(node.num_device_children, on_device, f"node {node.id}: children on the device counted, found")


def _check_shape(node: TreeNode, page_size: int) -> None:
    length = len(node.key)
    require(length > 0 and length % page_size == 0, True, f"node {node.id}: {length} units are whole pages")
    for rows in (node.value, node.host_value):
        if rows is not None:
            require(len(rows), length, f"node {node.id}: rows, units")
    for hashes in (node.hash_value, node.sequence_hash):
        if hashes is not None:
            require(len(hashes), length // page_size, f"node {node.id}: hashes, pages")


def _check_locks(node: TreeNode, root: TreeNode) -> None:
    require(node.lock_ref >= 0, True, f"node {node.id}: lock_ref {node.lock_ref} is not negative")
    parent = node.parent
    if parent is not None and parent is not root and parent.lock_ref < node.lock_ref:
        raise CacheStateError(
            f"node {node.id} has lock_ref {node.lock_ref}, its parent {parent.id} only {parent.lock_ref}"
        )


def _check_sizes(cache: RadixCache, nodes: list[TreeNode]) -> None:
    evictable = sum(len(node.key) for node in nodes if node.lock_ref == 0)
    protected = sum(len(node.key) for node in nodes if node.lock_ref > 0)
    require(cache.evictable_size(), evictable, "evictable size, units in unlocked nodes")
    require(cache.protected_size(), protected, "protected size, units in locked nodes")


def _check_leaves(cache: RadixCache, nodes: list[TreeNode]) -> None:
    above = {node.parent for node in nodes}
    leaves = {node.id for node in nodes if node.lock_ref == 0 and node not in above}
    kept = {node.id for node in cache.evictable_leaves}
    require(kept, leaves, "evictable leaves kept, found")
    cache.evictable_leaves.check()


def check_pages(
    allocator: PagedTokenToKVPoolAllocator, tree_rows: IndexArray, request_indices: IndexArray | None
) -> None:
    tree = tree_rows[:: allocator.page_size] // allocator.page_size
    free = allocator.free_pages()
    owned = no_indices() if request_indices is None else np.unique(request_indices // allocator.page_size)
    pages = np.concatenate((free, tree, owned))
    split = f"free {len(free)} + tree {len(tree)} + requests {len(owned)}"
    require(len(np.unique(pages)), len(pages), f"distinct pages of {split}, their number")
    if request_indices is not None:
        require(len(pages), allocator.size // allocator.page_size, f"{split}, pages of the pool")
