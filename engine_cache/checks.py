"""Invariants of a radix tree, recounted from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine_cache.errors import CacheStateError
from engine_cache.node import TreeNode, iter_nodes
from engine_cache.types import IndexArray, no_indices

if TYPE_CHECKING:
    from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
    from engine_cache.radix import RadixCache


def check_radix_cache(cache: RadixCache, request_indices: IndexArray | None) -> None:
    """Links, shapes, locks, sizes, leaf set and pages of a `RadixCache`; see `RadixCache.check`."""
    nodes = list(iter_nodes(cache.root_node))
    for node in (cache.root_node, *nodes):
        _check_links(node, cache.page_size)
    for node in nodes:
        _check_shape(node, cache.page_size)
        _check_locks(node, cache.root_node)
    _check_sizes(cache, nodes)
    _check_leaves(cache, nodes)
    rows = np.concatenate([node.value for node in nodes if node.value is not None] or [no_indices()])
    _require(len(np.unique(rows)), len(rows), "distinct rows in the tree, rows in the tree")
    if cache.allocator is not None:
        _check_pages(cache.allocator, rows, request_indices)


def _require(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise CacheStateError(f"{what}: {found} != {expected}")


def _check_links(node: TreeNode, page_size: int) -> None:
    """Child and parent agree, and a child's dictionary key is its first page; so no two children share one."""
    for key, child in node.children.items():
        _require(child.parent is node, True, f"node {child.id} names node {node.id} its parent")
        _require(child.key.page_key(page_size), key, f"first page of node {child.id}, its dictionary key")


def _check_shape(node: TreeNode, page_size: int) -> None:
    length = len(node.key)
    _require(length > 0 and length % page_size == 0, True, f"node {node.id}: {length} units are whole pages")
    if node.value is not None:
        _require(len(node.value), length, f"node {node.id}: rows, units")
    for hashes in (node.hash_value, node.sequence_hash):
        if hashes is not None:
            _require(len(hashes), length // page_size, f"node {node.id}: hashes, pages")


def _check_locks(node: TreeNode, root: TreeNode) -> None:
    _require(node.lock_ref >= 0, True, f"node {node.id}: lock_ref {node.lock_ref} is not negative")
    parent = node.parent
    if parent is not None and parent is not root and parent.lock_ref < node.lock_ref:
        raise CacheStateError(
            f"node {node.id} has lock_ref {node.lock_ref}, its parent {parent.id} only {parent.lock_ref}"
        )


def _check_sizes(cache: RadixCache, nodes: list[TreeNode]) -> None:
    evictable = sum(len(node.key) for node in nodes if node.lock_ref == 0)
    protected = sum(len(node.key) for node in nodes if node.lock_ref > 0)
    _require(cache.evictable_size(), evictable, "evictable size, units in unlocked nodes")
    _require(cache.protected_size(), protected, "protected size, units in locked nodes")


def _check_leaves(cache: RadixCache, nodes: list[TreeNode]) -> None:
    leaves = {node.id for node in nodes if node.lock_ref == 0 and not node.children}
    kept = {node.id for node in cache.evictable_leaves}
    _require(kept, leaves, "evictable leaves kept, found")


def _check_pages(
    allocator: PagedTokenToKVPoolAllocator, tree_rows: IndexArray, request_indices: IndexArray | None
) -> None:
    tree = tree_rows[:: allocator.page_size] // allocator.page_size
    free = allocator.free_pages()
    owned = no_indices() if request_indices is None else np.unique(request_indices // allocator.page_size)
    pages = np.concatenate((free, tree, owned))
    split = f"free {len(free)} + tree {len(tree)} + requests {len(owned)}"
    _require(len(np.unique(pages)), len(pages), f"distinct pages of {split}, their number")
    if request_indices is not None:
        _require(len(pages), allocator.size // allocator.page_size, f"{split}, pages of the pool")
