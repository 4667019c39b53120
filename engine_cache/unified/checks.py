"""Invariants of a unified tree, recounted from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine_cache.checks import check_host_tier, check_pages, check_radix_cache, discarded_rows, require
from engine_cache.tree.node import iter_nodes
from engine_cache.types import IndexArray, no_indices
from engine_cache.unified.component import AuxiliaryComponent
from engine_cache.unified.node import ComponentData, UnifiedNode, unified
from engine_cache.unified.swa import SWAComponent

if TYPE_CHECKING:
    from engine_cache.unified.cache import UnifiedRadixCache


def check_unified_cache(
    cache: UnifiedRadixCache, request_indices: IndexArray | None, request_slots: IndexArray | None
) -> None:
    """Tree, tiers, and of each kind beside KV where its data are, its locks, sizes, lists and rows; see
    `UnifiedRadixCache.check`."""
    check_radix_cache(cache, request_indices)
    if cache.cache_controller is not None:
        check_host_tier(cache)
    nodes = [unified(node) for node in iter_nodes(cache.root_node)]
    for component in cache.auxiliaries:
        _check_residency(component, nodes)
        _check_sizes(component, nodes)
        _check_lists(component, nodes)
        if cache.cache_controller is not None:
            _check_host_rows(cache, component, nodes)
        rows = np.concatenate(
            [no_indices(), *(each.value for each in _data(component, nodes) if each.value is not None)]
        )
        owned = cache._with_loading(request_slots)
        if isinstance(component, SWAComponent):
            _check_mapping(component, nodes)
            owned = None if request_indices is None else _mapped(component, request_indices)
        check_pages(component.device_allocator, rows, owned)


def _data(component: AuxiliaryComponent, nodes: list[UnifiedNode]) -> list[ComponentData]:
    return [component.data(node) for node in nodes]


def _check_residency(component: AuxiliaryComponent, nodes: list[UnifiedNode]) -> None:
    """Data of a kind only beside KV on the same tier, and locks only on what is there and, on the device, no more than
    KV has."""
    for node, data in zip(nodes, _data(component, nodes), strict=True):
        what = f"node {node.id}, {component.kind.name}"
        require(data.value is None or node.value is not None, True, f"{what}: data on the device beside KV")
        require(data.host_value is None or node.host_value is not None, True, f"{what}: data on the host beside KV")
        require(0 <= data.lock_ref <= node.lock_ref, True, f"{what}: 0 <= lock_ref {data.lock_ref} <= {node.lock_ref}")
        require(data.lock_ref == 0 or data.value is not None, True, f"{what}: locked data are on the device")
        require(data.host_lock_ref >= 0, True, f"{what}: host_lock_ref {data.host_lock_ref} >= 0")
        require(data.pending_id is None or data.lock_ref > 0, True, f"{what}: what is copied to the host is locked")


def _check_sizes(component: AuxiliaryComponent, nodes: list[UnifiedNode]) -> None:
    held = [data for data in _data(component, nodes) if data.value is not None]
    protected = sum(len(data.value) for data in held if data.lock_ref > 0 and data.value is not None)
    total = sum(len(data.value) for data in held if data.value is not None)
    what = f"{component.kind.name} rows"
    require(component.protected_size, protected, f"protected {what}, those of locked nodes")
    require(component.evictable_size, total - protected, f"evictable {what}, those of unlocked nodes")


def _check_lists(component: AuxiliaryComponent, nodes: list[UnifiedNode]) -> None:
    on_device, host_only = set(), set()
    for node, data in zip(nodes, _data(component, nodes), strict=True):
        if data.value is not None:
            on_device.add(node.id)
        elif data.host_value is not None and data.host_lock_ref == 0:
            host_only.add(node.id)
    for listed, expected in ((component.device_lru_list, on_device), (component.host_lru_list, host_only)):
        listed.check()
        require({node.id for node in listed}, expected, f"{component.kind.name} list: nodes listed, in the tree")


def _check_host_rows(cache: UnifiedRadixCache, component: AuxiliaryComponent, nodes: list[UnifiedNode]) -> None:
    pool = component.entry.host_pool
    tree = [data.host_value for data in _data(component, nodes) if data.host_value is not None]
    copies = discarded_rows(cache, component.pool)
    prefetches = [] if cache.storage is None else cache.storage.owned_extras(component.pool)
    used = np.concatenate([no_indices(), *tree, *copies, *prefetches])[:: pool.page_size] // pool.page_size
    pages = np.concatenate((pool.free_pages(), used))
    owners = f"{len(tree)} nodes, {len(copies)} dropped copies and {len(prefetches)} prefetches"
    what = f"{component.kind.name} host pages of {owners}"
    require(len(np.unique(pages)), len(pages), f"{what}: distinct, all")
    require(len(pages), pool.size // pool.page_size, f"{what} and free pages, pages of the pool")


def _check_mapping(component: SWAComponent, nodes: list[UnifiedNode]) -> None:
    """The SWA rows of a node are those that its full rows are mapped to; a tombstone's are mapped to none."""
    for node in nodes:
        if node.value is not None:
            held = component.data(node).value
            mapped = component.allocator.translate(node.value)
            expected = np.zeros(len(node.key), np.int64) if held is None else held
            require(mapped.tolist(), expected.tolist(), f"node {node.id}: SWA rows mapped, held")


def _mapped(component: SWAComponent, request_indices: IndexArray) -> IndexArray:
    rows = component.allocator.translate(request_indices)
    return rows[rows > 0]
