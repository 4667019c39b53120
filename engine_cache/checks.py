"""Checks that recount the invariants of a cache. Each raises CacheStateError with both figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_cache.components.component import AuxiliaryComponent
from engine_cache.components.mamba import MambaComponent
from engine_cache.components.swa import SWAComponent
from engine_cache.errors import CacheStateError
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.pools.entry import HostPool
from engine_cache.storage.base import PoolName
from engine_cache.tiers.host import HostTier
from engine_cache.tiers.storage import StorageTier
from engine_cache.tree.node import ComponentData, TreeNode, iter_nodes
from engine_cache.tree.tree import RadixTree
from engine_cache.types import IndexArray, no_indices


def require(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise CacheStateError(f"{what}: {found} != {expected}")


# --- tree and device ------------------------------------------------------------------------------------------------


def check_tree(
    tree: RadixTree, allocator: PagedTokenToKVPoolAllocator | None, request_indices: IndexArray | None
) -> None:
    """Check links, shapes, locks, sizes, leaves and rows. request_indices: rows that requests own in addition to the
    tree's."""
    nodes = list(iter_nodes(tree.root))
    for node in (tree.root, *nodes):
        _check_links(node, tree.page_size)
    for node in nodes:
        _check_shape(node, tree.page_size)
        _check_locks(node, tree.root)
    on_device = [node for node in nodes if node.value is not None]
    _check_sizes(tree, on_device)
    above = {node.parent for node in on_device}
    leaves = {node.id for node in on_device if node.lock_ref == 0 and node not in above}
    require({node.id for node in tree.device_leaves}, leaves, "evictable leaves kept, found")
    tree.device_leaves.check()
    rows = _joined([node.value for node in nodes])
    require(len(np.unique(rows)), len(rows), "distinct rows in the tree, rows in the tree")
    if allocator is not None:
        check_pages(allocator, rows, request_indices)


def _check_links(node: TreeNode, page_size: int) -> None:
    """Check that child and parent agree, and that the dictionary key of a child is its first page. Two children
    therefore never share a page."""
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


def _check_sizes(tree: RadixTree, nodes: list[TreeNode]) -> None:
    evictable = sum(len(node.key) for node in nodes if node.lock_ref == 0)
    protected = sum(len(node.key) for node in nodes if node.lock_ref > 0)
    require(tree.evictable_size, evictable, "evictable size, units in unlocked nodes")
    require(tree.protected_size, protected, "protected size, units in locked nodes")


def check_pages(
    allocator: PagedTokenToKVPoolAllocator, tree_rows: IndexArray, request_indices: IndexArray | None
) -> None:
    """Check that every page of an allocator has exactly one owner."""
    tree = tree_rows[:: allocator.page_size] // allocator.page_size
    free = allocator.free_pages()
    owned = no_indices() if request_indices is None else np.unique(request_indices // allocator.page_size)
    pages = np.concatenate((free, tree, owned))
    split = f"free {len(free)} + tree {len(tree)} + requests {len(owned)}"
    require(len(np.unique(pages)), len(pages), f"distinct pages of {split}, their number")
    if request_indices is not None:
        require(len(pages), allocator.size // allocator.page_size, f"{split}, pages of the pool")


def check_order_of_states(states: MambaComponent) -> None:
    """Check that states and their nodes have the same order of use."""
    times = [node.last_access_time for node in states.device_lru_list]
    require(times, sorted(times), "mamba list: times of use, in order")


def check_no_tombstone_leaf(tree: RadixTree, states: MambaComponent) -> None:
    """Check that leaves without a state are locked. No match can end at such a leaf, so an unlocked one must be
    deleted."""
    for node in iter_nodes(tree.root):
        if not node.children and states.data(node).value is None:
            require(states.data(node).lock_ref > 0, True, f"node {node.id}: a leaf without a state is locked")


# --- components -----------------------------------------------------------------------------------------------------


def check_component(
    component: AuxiliaryComponent,
    tree: RadixTree,
    request_indices: IndexArray | None,
    request_slots: IndexArray | None,
) -> None:
    """Check positions, locks, sizes, LRU lists and device rows of one kind of state.

    request_indices, request_slots: KV rows and state slots that requests own in addition to the tree's.
    """
    nodes = list(iter_nodes(tree.root))
    held = [(node, component.data(node)) for node in nodes]
    for node, data in held:
        _check_residency(component.pool.value, node, data)
    _check_component_sizes(component, [data for _, data in held])
    on_device = {node.id for node, data in held if data.value is not None}
    on_host = {node.id for node in nodes if component.is_on_host_list(node)}
    for listed, expected in ((component.device_lru_list, on_device), (component.host_lru_list, on_host)):
        require({node.id for node in listed}, expected, f"{component.pool.value} list: nodes listed, in the tree")
    owned = request_slots
    if isinstance(component, SWAComponent):
        _check_mapping(component, nodes)
        mapped = None if request_indices is None else component.allocator.translate(request_indices)
        owned = None if mapped is None else mapped[mapped > 0]
    elif isinstance(component, MambaComponent) and owned is not None:
        owned = np.concatenate((owned, component.loading_slots.given_up()))
    check_pages(component.device_allocator, _joined([data.value for _, data in held]), owned)


def _check_residency(name: str, node: TreeNode, data: ComponentData) -> None:
    """Check that a node with data of a kind has KV on the same tier and, on the device, at least as many locks on
    KV."""
    what, locks = f"node {node.id}, {name}", (data.lock_ref, node.lock_ref)
    require(data.value is None or node.value is not None, True, f"{what}: data on the device beside KV")
    require(data.host_value is None or node.host_value is not None, True, f"{what}: data on the host beside KV")
    require(0 <= locks[0] <= locks[1], True, f"node {node.id}: 0 <= {name}_lock_ref <= lock_ref, {locks}")
    require(data.host_lock_ref >= 0, True, f"{what}: host_lock_ref {data.host_lock_ref} >= 0")
    is_copied = data.pending_id is not None
    require(not is_copied or data.host_lock_ref > 0, True, f"{what}: what is copied to the host is locked there")


def _check_component_sizes(component: AuxiliaryComponent, held: list[ComponentData]) -> None:
    sizes = [(data.lock_ref > 0, len(data.value)) for data in held if data.value is not None]
    what = "states" if isinstance(component, MambaComponent) else f"{component.pool.value} rows"
    protected = sum(size for is_locked, size in sizes if is_locked)
    require(component.protected_size, protected, f"protected {what}, those of locked nodes")
    total = sum(size for _, size in sizes)
    require(component.evictable_size, total - protected, f"evictable {what}, those of unlocked nodes")


def _check_mapping(component: SWAComponent, nodes: list[TreeNode]) -> None:
    """Check that the SWA rows of a node are those that its full rows are mapped to. Tombstones must have no mapping."""
    for node in nodes:
        if node.value is not None:
            held = component.data(node).value
            mapped = component.allocator.translate(node.value)
            expected = np.zeros(len(node.key), np.int64) if held is None else held
            require(mapped.tolist(), expected.tolist(), f"node {node.id}: SWA rows mapped, held")


# --- host tier ------------------------------------------------------------------------------------------------------


def check_host_tier(host: HostTier, store: StorageTier | None) -> None:
    """Check residency, pending backups, leaves and pages of the host, and the units that prefetches occupy."""
    host.controller.require_loads()
    tree = host.device.tree
    nodes = list(iter_nodes(tree.root))
    for node in nodes:
        _check_tiers(node, tree.root, host.backups.write_policy)
    leaves = {
        node.id
        for node in nodes
        if node.value is None
        and node.host_ref_counter == 0
        and all(child.host_value is None for child in node.children.values())
    }
    require({node.id for node in tree.host_leaves}, leaves, "evictable host leaves kept, found")
    tree.host_leaves.check()
    _check_pending(host, nodes)
    prefetched = [] if store is None else store.io.owned_rows()
    _check_host_pages(PoolName.KV, host.controller.kv.host_pool, host, [node.host_value for node in nodes], prefetched)
    if store is not None:
        occupied = sum(len(operation.key) for operation in store.ongoing_prefetches.values())
        require(store.prefetch_tokens_occupied, occupied, "units occupied by prefetches, units of those in flight")


def check_host_rows(component: AuxiliaryComponent, host: HostTier, store: StorageTier | None) -> None:
    """Check that every host row of one kind has exactly one owner."""
    held = [component.data(node).host_value for node in iter_nodes(host.device.tree.root)]
    prefetched = [] if store is None else store.io.owned_extras(component.pool)
    _check_host_pages(component.pool, component.entry.host_pool, host, held, prefetched)


def _check_tiers(node: TreeNode, root: TreeNode, write_policy: str) -> None:
    parent = node.parent
    assert parent is not None
    require(node.host_ref_counter >= 0, True, f"node {node.id}: host_ref_counter {node.host_ref_counter} >= 0")
    require(node.value is None and node.host_value is None, False, f"node {node.id} is on no tier")
    if node.value is not None:
        require(parent.value is not None, True, f"node {node.id} is on the device, its parent {parent.id}, too")
    if node.host_value is not None and write_policy != "write_back" and parent is not root:
        require(parent.host_value is not None, True, f"node {node.id} is on the host, its parent {parent.id}, too")


def _check_pending(host: HostTier, nodes: list[TreeNode]) -> None:
    backups = host.backups.ongoing.items()
    pending = {node.id: node.write_through_pending_id for node in nodes if node.write_through_pending_id is not None}
    published = [(node.id, ack_id) for ack_id, backup in backups for node in backup.publish]
    require(sorted(published), sorted(pending.items()), "nodes to publish, pending nodes")
    for component in host.device.components:
        copied = {node.id: component.data(node).pending_id for node in nodes}
        copied = {node_id: ack_id for node_id, ack_id in copied.items() if ack_id is not None}
        parts = {node.id: ack_id for ack_id, backup in backups for each, node in backup.parts if each is component}
        require(copied, parts, f"{component.kind.name} data on their way to the host, parts of backups")
    for ack_id, backup in backups:
        require(backup.node.lock_ref > 0, backup.is_locked, f"node {backup.node.id} of backup {ack_id} is locked")
    for node in host.loads.ongoing.values():
        require(node.value is not None and node.lock_ref > 0, True, f"loading node {node.id} is locked on the device")


def _check_host_pages(
    name: PoolName,
    pool: HostPool,
    host: HostTier,
    held: Sequence[IndexArray | None],
    prefetched: Sequence[IndexArray],
) -> None:
    discarded = [rows for backup in host.backups.ongoing.values() for owner, rows in backup.discarded if owner is name]
    used = _joined([*held, *discarded, *prefetched])[:: pool.page_size] // pool.page_size
    pages = np.concatenate((pool.free_pages(), used))
    num_nodes = sum(rows is not None for rows in held)
    owners = f"{num_nodes} nodes, {len(discarded)} dropped copies and {len(prefetched)} prefetches"
    what = f"{name.value} host pages of {owners}"
    require(len(np.unique(pages)), len(pages), f"{what}: distinct, all")
    require(len(pages), pool.size // pool.page_size, f"{what} and free pages, pages of the pool")


def _joined(rows: Sequence[IndexArray | None]) -> IndexArray:
    return np.concatenate([no_indices(), *(each for each in rows if each is not None)])
