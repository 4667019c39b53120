"""A recount of a whole cache: its links, hashes and sizes, and the owner of every row of every pool."""

from collections.abc import Sequence

import numpy as np

from engine_cache import MambaRadixCache, TreeCache
from engine_cache.components.component import AuxiliaryComponent
from engine_cache.components.mamba import MambaComponent
from engine_cache.components.swa import SWAComponent
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.pools.entry import HostPool
from engine_cache.sanity import require
from engine_cache.storage.base import PoolName
from engine_cache.tiers.host import HostTier
from engine_cache.tiers.storage import StorageTier
from engine_cache.tree.node import TreeNode, iter_nodes
from engine_cache.tree.tree import RadixTree
from engine_cache.types import IndexArray, no_indices


def check_cache(
    cache: TreeCache, request_indices: IndexArray | None = None, request_slots: IndexArray | None = None
) -> None:
    """Recount every invariant of the tree, the components, the tiers and the pools.

    The result is exact between two operations, except for prefetches that another thread is processing. Raises
    CacheStateError with both figures at the first mismatch.

    request_indices, request_slots: rows and state slots that running requests own in addition to the tree's. If they
    are given, they and the tree's must add up to the figures of the allocators.
    """
    tree, nodes = cache.tree, list(iter_nodes(cache.tree.root))
    if type(cache) is MambaRadixCache:
        check_no_tombstone_leaf(tree, cache.states)
    for node in (tree.root, *nodes):
        _check_links(node, tree.page_size)
    for node in nodes:
        _check_shape(node, tree.page_size)
    cache.sanity_check()
    rows = _joined([node.value for node in nodes])
    require(len(np.unique(rows)), len(rows), "distinct rows in the tree, rows in the tree")
    if cache.allocator is not None:
        check_pages(cache.allocator, rows, request_indices)
    for component in cache.auxiliaries:
        check_component(component, nodes, request_indices, request_slots)
    if cache.host is not None:
        check_host_tier(cache.host, cache.store)
        for component in cache.auxiliaries:
            check_host_rows(component, cache.host, cache.store)
    if type(cache) is MambaRadixCache:
        times = [node.last_access_time for node in cache.states.device_lru_list]
        require(times, sorted(times), "mamba list: times of use, in order")


# --- tree and device ------------------------------------------------------------------------------------------------


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


def check_no_tombstone_leaf(tree: RadixTree, states: MambaComponent) -> None:
    """Check that leaves without a state are locked. No match can end at such a leaf, so an unlocked one must be
    deleted."""
    for node in iter_nodes(tree.root):
        if not node.children and states.data(node).value is None:
            require(states.data(node).lock_ref > 0, True, f"node {node.id}: a leaf without a state is locked")


# --- components -----------------------------------------------------------------------------------------------------


def check_component(
    component: AuxiliaryComponent,
    nodes: list[TreeNode],
    request_indices: IndexArray | None,
    request_slots: IndexArray | None,
) -> None:
    """Check the device rows of one kind of state.

    request_indices, request_slots: KV rows and state slots that requests own in addition to the tree's.
    """
    held = [component.data(node) for node in nodes]
    for node, data in zip(nodes, held, strict=True):
        what = f"node {node.id}, {component.pool.value}: what is copied to the host is locked there"
        require(data.pending_id is None or data.host_lock_ref > 0, True, what)
        what = f"node {node.id}, {component.pool.value}: what is locked is of a locked node"
        require(data.lock_ref == 0 or node.lock_ref > 0, True, what)
    owned = request_slots
    if isinstance(component, SWAComponent):
        _check_mapping(component, nodes)
        mapped = None if request_indices is None else component.allocator.translate(request_indices)
        owned = None if mapped is None else mapped[mapped > 0]
    elif isinstance(component, MambaComponent) and owned is not None:
        owned = np.concatenate((owned, component.released_slots()))
    check_pages(component.device_allocator, _joined([data.value for data in held]), owned)


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
        _check_host_prefix(node, tree.root, host.backups.write_policy)
    _check_pending(host, nodes)
    prefetched = [] if store is None else [operation.rows() for operation in store.io.prefetches]
    _check_host_pages(PoolName.KV, host.controller.kv.host_pool, host, [node.host_value for node in nodes], prefetched)
    if store is not None:
        occupied = sum(len(operation.key) for operation in store.ongoing_prefetches.values())
        require(store.prefetch_tokens_occupied, occupied, "units occupied by prefetches, units of those in flight")


def check_host_rows(component: AuxiliaryComponent, host: HostTier, store: StorageTier | None) -> None:
    """Check that every host row of one kind has exactly one owner."""
    held = [component.data(node).host_value for node in iter_nodes(host.device.tree.root)]
    extras = [] if store is None else [extra for operation in store.io.prefetches for extra in operation.extras]
    owned = [extra.host_indices for extra in extras if extra.name is component.pool]
    prefetched = [rows for rows in owned if rows is not None]
    _check_host_pages(component.pool, component.entry.host_pool, host, held, prefetched)


def _check_host_prefix(node: TreeNode, root: TreeNode, write_policy: str) -> None:
    parent = node.parent
    assert parent is not None
    require(node.host_ref_counter >= 0, True, f"node {node.id}: host_ref_counter {node.host_ref_counter} >= 0")
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
        require(
            backup.node.lock_ref > 0, backup.lock is not None, f"node {backup.node.id} of backup {ack_id} is locked"
        )
    for node in host.ongoing_loads.values():
        require(node.value is not None and node.lock_ref > 0, True, f"loading node {node.id} is locked on the device")


def _check_host_pages(
    name: PoolName, pool: HostPool, host: HostTier, held: Sequence[IndexArray | None], prefetched: Sequence[IndexArray]
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
