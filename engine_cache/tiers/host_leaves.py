"""The host's side of a radix tree: what lies on the host only, who holds it, and what goes when room is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine_cache.radix import RadixCache
from engine_cache.transfer import HiCacheController
from engine_cache.tree.eviction import EvictionQueue
from engine_cache.tree.node import TreeNode
from kv_events.schema import StorageMedium


class HostLeaves(RadixCache):
    """Nodes that are on the host only and that no other hangs below may be deleted, unless somebody holds them."""

    controller: HiCacheController

    def reset(self) -> None:
        self.evictable_host_leaves = EvictionQueue(self._policy)
        super().reset()

    def evict_host(self, num_tokens: int) -> int:
        """Delete nodes that are on the host only, until `num_tokens` units of host rows are free or none is left that
        may go; the units."""
        leaves, pool = self.evictable_host_leaves, self.controller.kv.host_pool
        before, laid_bare = pool.available_size(), []
        while pool.available_size() - before < num_tokens and (leaf := leaves.pop()) is not None:
            parent = leaf.parent
            left = self._evict_host_leaf(leaf)
            if left is not parent:  # after a cascade: it has its turn next time
                leaves.discard(left)
                laid_bare.append(left)
        for node in laid_bare:
            self._update_host_leaf(node)
        return pool.available_size() - before

    def _evict_host_leaf(self, leaf: TreeNode) -> TreeNode:
        parent = leaf.parent
        assert parent is not None
        assert leaf.host_value is not None
        self._record_remove_event(leaf, StorageMedium.CPU)
        self.controller.kv.host_pool.free(leaf.host_value)
        leaf.host_value = None
        leaf.detach()
        del parent.children[leaf.key.page_key(self.page_size)]
        self.evictable_host_leaves.discard(leaf)
        self._update_leaf(parent)
        return parent

    def _hold_host_kv(self, node: TreeNode) -> None:
        """Keep the KV that the node has on the host, until `_release_host_kv`."""
        node.host_ref_counter += 1
        self.evictable_host_leaves.discard(node)

    def _release_host_kv(self, node: TreeNode) -> None:
        """Take one `_hold_host_kv` back."""
        assert node.host_ref_counter > 0, f"node {node.id} released with host_ref_counter 0"
        node.host_ref_counter -= 1
        self._update_host_leaf(node)

    @contextmanager
    def _host_kv_held(self, node: TreeNode) -> Iterator[None]:
        self._hold_host_kv(node)
        try:
            yield
        finally:
            self._release_host_kv(node)

    def _touch(self, path: list[TreeNode]) -> None:
        super()._touch(path)
        self.evictable_host_leaves.used(path)

    def _update_leaf(self, node: TreeNode) -> None:
        super()._update_leaf(node)
        self._update_host_leaf(node)

    def _update_host_leaf(self, node: TreeNode) -> None:
        is_on_host_only = node.value is None and node.host_value is not None
        if is_on_host_only and not node.children and node.host_ref_counter == 0:
            self.evictable_host_leaves.add(node)
        else:
            self.evictable_host_leaves.discard(node)
