"""KV of sliding-window layers. A match needs it for the last tokens before its end, without gaps.

    root ── A ── B* ── C*        *: has SWA rows. window 4, C 3 units, B 2: a match may end at C (3 + 2 units),
                                 not at B (2 units, then a gap)

The root counts as covered: a prefix shorter than the window needs SWA rows throughout. A lock covers the nodes from one
node up to the node at which one window of rows is complete, without the gaps.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import ClassVar

import numpy as np

from engine_cache.base import InsertParams, MatchResult, Request
from engine_cache.components.component import AuxiliaryComponent, MatchedPath, MatchValidator
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from engine_cache.storage.base import PoolHitPolicy, PoolName, PoolTransfer
from engine_cache.storage.operations import PrefetchOperation
from engine_cache.tree.node import ComponentType, TreeNode, split_rows
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError, check_positive
from kv_events.streams import Group


class SWAComponent(AuxiliaryComponent):
    """Sliding-window KV.

    allocator: the tree's, owner of full and SWA rows. sliding_window_size: tokens, a positive number.
    """

    kind: ClassVar[ComponentType] = ComponentType.SWA
    pool: ClassVar[PoolName] = PoolName.SWA
    eviction_priority: ClassVar[int] = 1
    builds_on_start_node: ClassVar[bool] = True

    def __init__(self, allocator: SWATokenToKVPoolAllocator, sliding_window_size: int) -> None:
        check_positive(sliding_window_size=sliding_window_size)
        self.allocator = allocator
        self.window = sliding_window_size
        self.window_pages = -(-sliding_window_size // allocator.page_size)
        self.event_group = Group("swa", sliding_window_size).name

    @property
    def device_allocator(self) -> PagedTokenToKVPoolAllocator:
        return self.allocator.swa

    def create_match_validator(self, match_device_only: bool = False) -> MatchValidator:
        covered = math.inf  # units with SWA rows directly above the end of the node

        def accepts(node: TreeNode) -> bool:
            nonlocal covered
            data = self.data(node)
            if data.value is None and (match_device_only or data.host_value is None):
                covered = 0
                return False
            covered += len(node.key)
            return covered >= self.window

        return accepts

    def finalize_match_result(self, result: MatchResult, path: MatchedPath) -> MatchResult:
        to_load = self._to_load(result.best_match_node)
        return result._replace(swa_host_hit_length=sum(len(node.key) for node in to_load))

    def touched(self, path: Sequence[TreeNode]) -> None:
        """Mark as used only the window that a match at the end of the path needs."""
        first, covered = len(path), 0
        while first > 0 and covered < self.window + self.allocator.page_size:
            first -= 1
            covered += len(path[first].key)
        super().touched(path[first:])

    def touched_on_insert(self, node: TreeNode) -> None:
        """Do nothing: the window is not known until `finish_insert`, which marks it as used."""

    def finish_insert(self, end: TreeNode, params: InsertParams) -> bool:
        """Mark as used only the window that ends at this node, which may be a new leaf."""
        self.touched(self.tree.path_to_root(end)[::-1])
        return True

    def _window_above(self, node: TreeNode) -> Iterator[TreeNode]:
        """Yield the node and its ancestors until one window is covered or the root is reached."""
        step, covered = node, 0
        while step.parent is not None and covered < self.window:
            yield step
            covered += len(step.key)
            step = step.parent

    def _to_load(self, node: TreeNode) -> list[TreeNode]:
        """Return the nodes of the window with SWA rows on the host only, root side first, up to the first gap."""
        nodes = []
        for step in self._window_above(node):
            data = self.data(step)
            if data.value is None and data.host_value is None:
                break
            if data.value is None:
                nodes.append(step)
        nodes.reverse()
        return nodes

    def _free_device_rows(self, node: TreeNode, rows: IndexArray) -> None:
        assert node.value is not None
        self.allocator.free_swa(node.value)

    def was_split(self, upper: TreeNode, lower: TreeNode, split_len: int) -> None:
        above, below = self.data(upper), self.data(lower)
        above.lock_ref, above.host_lock_ref = below.lock_ref, below.host_lock_ref
        above.value, below.value = split_rows(below.value, split_len)
        above.host_value, below.host_value = split_rows(below.host_value, split_len)
        above.pending_id = below.pending_id
        if below.lock_ref or below.host_lock_ref:
            for nodes, _ in self._locked.values():
                if lower in nodes:
                    nodes.insert(nodes.index(lower) + 1, upper)
        for listed in (self.device_lru_list, self.host_lru_list):
            if lower in listed:  # as the newest, because a split counts as use
                listed[upper] = None
                listed.move_to_end(lower)

    def nodes_to_lock(self, node: TreeNode, on_host: bool) -> list[TreeNode]:
        """Return the nodes of one window of rows, not counting gaps.

        For a node that is not on the device, a window on the device ends at its nearest ancestor there.
        """
        nodes, covered, step = list[TreeNode](), 0, node
        while step.parent is not None and covered < self.window:
            data = self.data(step)
            if (data.host_value if on_host else data.value) is not None:
                nodes.append(step)
                covered += len(step.key)
            step = step.parent
        return nodes

    def check_insert(self, params: InsertParams) -> None:
        evicted, page_size = params.swa_evicted_seqlen, self.allocator.page_size
        if evicted < 0 or evicted % page_size:
            raise InvalidValueError("swa_evicted_seqlen", evicted, f"a multiple of the page size {page_size}")
        assert params.value is not None
        own = params.value[max(evicted, params.prev_prefix_len) :]
        unmapped = own[self.allocator.translate(own) == 0]
        if len(unmapped):
            raise InvalidValueError(
                "value", f"full row {unmapped[0]} without an SWA row", "rows with one after swa_evicted_seqlen"
            )

    def should_skip_leaf_creation(self, end: int, params: InsertParams) -> bool:
        return params.swa_evicted_seqlen >= end

    def update_on_overlap(self, node: TreeNode, start: int, params: InsertParams) -> None:
        """Move the SWA rows of the caller to a tombstone, which keeps its own Full rows: they may be in use."""
        num_without = self._units_without_window(start, max(params.swa_evicted_seqlen, params.prev_prefix_len))
        if self.data(node).value is not None or num_without >= len(node.key):
            return
        if num_without:
            self.tree.split(node, num_without)
        assert node.value is not None
        assert params.value is not None
        rows = params.value[start + num_without : start + num_without + len(node.key)]
        self.put_on_device(node, self.allocator.move_swa(rows, node.value))

    def recover_after_unevict(self, node: TreeNode, start: int, params: InsertParams) -> None:
        """Use the SWA rows of the Full rows that the node received, except those freed before.

        Splits a leaf that is longer than one window, so that a lock protects no more than one window.
        """
        num_without = self._units_without_window(start, params.swa_evicted_seqlen)
        if num_without >= len(node.key):
            return
        if num_without:
            self.tree.split(node, num_without)
        assert node.value is not None
        self.put_on_device(node, self.allocator.translate(node.value))
        beyond = len(node.key) - self.window_pages * self.allocator.page_size
        if beyond > 0 and not node.children:
            self.tree.split(node, beyond)

    def _units_without_window(self, start: int, evicted: int) -> int:
        """Return how many leading units, in whole pages, of a node after `start` units have no SWA rows."""
        page_size = self.allocator.page_size
        return -(-max(0, evicted - start) // page_size) * page_size

    def needed_nodes(self, node: TreeNode) -> list[TreeNode]:
        return list(self._window_above(node))

    def load_transfers(self, node: TreeNode, req: Request | None) -> list[PoolTransfer]:
        nodes = self._to_load(node)
        if not nodes:
            return []
        rows = np.concatenate([self.data(step).host_value for step in nodes])
        return [PoolTransfer(self.pool, host_indices=rows, nodes_to_load=list(nodes))]

    def commit_load(self, ack_id: int, node: TreeNode, transfers: list[PoolTransfer], req: Request | None) -> None:
        for transfer in transfers:
            assert transfer.device_indices is not None
            start = 0
            for step in transfer.nodes_to_load or ():
                rows = transfer.device_indices[start : start + len(step.key)].copy()
                assert step.value is not None
                self.allocator.map_swa(step.value, rows)
                self.put_on_device(step, rows)
                start += len(rows)

    def archive_transfer(self, node: TreeNode, keys: list[str]) -> PoolTransfer:
        rows = self.data(node).host_value
        return PoolTransfer(self.pool, host_indices=rows, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def prefetch_transfer(self, start_node: TreeNode, num_pages: int) -> PoolTransfer | None:
        """See `AuxiliaryComponent`. If less than a window is fetched, the nodes above must have the rest."""
        above = (self.data(step) for step in self._window_above(start_node))
        if any(data.value is None and data.host_value is None for data in above):
            return None
        num_keys = min(num_pages, self.window_pages)
        return PoolTransfer(self.pool, keys=[""] * num_keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def commit_prefetch(self, end: TreeNode, fetched: PoolTransfer, operation: PrefetchOperation) -> None:
        """Fill all tombstones of the window below the start node, from the end upwards, or none of them."""
        assert fetched.host_indices is not None
        behind = takewhile(lambda step: step is not operation.start_node, self._window_above(end))
        num_units = min(len(fetched.host_indices), sum(len(step.key) for step in behind))
        if operation.extra_pool_hit_pages.get(self.pool, 0) * self.allocator.page_size < num_units:
            return
        rows, fetched.host_indices = fetched.host_indices[:num_units], fetched.host_indices[num_units:]
        node = end
        while len(rows):
            taken = min(len(node.key), len(rows))
            self._fill_on_host(node, rows[-taken:])
            rows = rows[:-taken]
            assert node.parent is not None
            node = node.parent

    def _fill_on_host(self, node: TreeNode, rows: IndexArray) -> None:
        """Give a node host rows for its last units. If it cannot use them, free them."""
        if self.data(node).host_value is not None or node.host_value is None:
            self.entry.host_pool.free(rows)
            return
        if len(rows) < len(node.key):
            self.tree.split(node, len(node.key) - len(rows))
        self.put_on_host(node, rows.copy())
        self.record_on_host(node)
