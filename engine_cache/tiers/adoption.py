"""Adoption: pages that have come from a store into the tree, as host copies of its nodes or as a node of their own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from engine_cache.storage.base import PoolTransfer
from engine_cache.storage_operations import PrefetchOperation
from engine_cache.tiers.archive import Archives
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray
from kv_events.schema import StorageMedium


class Adoption(Archives):
    """What becomes of fetched rows: each is the tree's, or free again."""

    def _insert_helper_host(self, operation: PrefetchOperation, rows: IndexArray) -> int:
        """Hang fetched pages below the anchor: what is in the tree already is freed, or becomes the host copy of a node
        that had none; the rest is one new node on the host. The units that were in the tree. If that fails, the rows
        that the tree has not taken are freed."""
        if not len(rows):
            return 0
        key, node, done = operation.key[: len(rows)], operation.anchor, 0
        with ExitStack() as undo:
            undo.callback(lambda: self._free_host(rows[done:]))
            self._settle(node)
            if node.host_value is None and node is not self.root_node:
                return len(rows)  # its own backup has failed, so nothing may hang below it on the host
            while done < len(key):
                child = self._next_on_path(node, key, done)
                if child is None:
                    break
                self._touch([child])
                self._settle(child)
                self._adopt_or_free(child, rows[done : done + len(child.key)])
                node, done = child, done + len(child.key)
            if done < len(key):
                hashes = operation.hashes[done // self.page_size : len(key) // self.page_size]
                node = self._add_host_leaf(node, key[done:], rows[done:], hashes)
            undo.pop_all()
        self._take_extras(operation, node)
        return done

    def _take_extras(self, operation: PrefetchOperation, end: TreeNode) -> None:
        """Give the node at which the fetched prefix ends the sidecar state that was read for it."""

    def _settle(self, node: TreeNode) -> None:
        """Nothing may be told of the host below a node whose own copy has not been acknowledged: wait for it."""
        if node.write_through_pending_id is not None:
            self._await_backup(node.write_through_pending_id)

    def _adopt_or_free(self, node: TreeNode, rows: IndexArray) -> None:
        if node.host_value is not None:
            self._free_host(rows)
        else:
            self._record_store_event(node, StorageMedium.CPU)  # before anything changes: naming the pages may fail
            node.host_value = rows.copy()

    def _add_host_leaf(self, parent: TreeNode, key: RadixKey, rows: IndexArray, hashes: list[str]) -> TreeNode:
        leaf = self._new_node(key, None, parent, parent.priority)
        leaf.host_value, leaf.hash_value = rows.copy(), hashes
        self._record_store_event(leaf, StorageMedium.CPU)  # before anything changes, as above
        parent.children[key.page_key(self.page_size)] = leaf
        self._update_leaf(leaf)
        self._update_leaf(parent)
        return leaf

    def _free_host(self, rows: IndexArray | None) -> None:
        if rows is not None and len(rows):
            self.controller.kv.host_pool.free(rows)

    def _free_extras(self, extras: Iterable[PoolTransfer]) -> None:
        for extra in extras:
            if extra.host_indices is not None:
                self.controller.entry(extra.name).host_pool.free(extra.host_indices)
