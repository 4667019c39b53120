"""The host tier of a radix cache: backups, load-backs and evictions, and when each may be told to the router.

    on device only ── write_backup ──> pending ── writing_check ──> on both ── _evict_backuped ──> on host only
                                                                    on both <─────── load_back ──────────┘

A node is backed up when its hits reach a threshold (write-through) or when it is evicted (write-back). In write-through
modes what has a host copy is always a prefix, as what is on the device is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import numpy as np

from engine_cache.base import (
    DecLockRefResult,
    EvictParams,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    MatchResult,
    Request,
)
from engine_cache.errors import CacheStateError
from engine_cache.eviction import EvictionQueue
from engine_cache.key import RadixKey
from engine_cache.node import TreeNode, iter_nodes, split_rows
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.radix import RadixCache
from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.transfer import HiCacheController
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium

log = logging.getLogger(__name__)

_HITS_TO_BACK_UP = {"write_through": 1, "write_through_selective": 2}
WRITE_POLICIES = (*_HITS_TO_BACK_UP, "write_back")


@dataclass(slots=True, eq=False)
class BackupOperation:
    """A backup that has not been acknowledged."""

    node: TreeNode
    lock: IncLockRefResult | None
    """Held on the node meanwhile; None: it is a write-back."""
    publish: list[TreeNode]
    """The node and what was split off it since, parents first: whose copies the acknowledgement is about."""
    discarded: list[tuple[PoolName, IndexArray]] = field(default_factory=list)
    """Host rows that the copy still writes and nobody wants any more."""

    @property
    def is_locked(self) -> bool:
        return self.lock is not None


class HostTier(RadixCache):
    """What caches with a host tier share. A concrete class calls `_init_host_tier` before the constructor above it."""

    controller: HiCacheController

    def _init_host_tier(
        self,
        controller: HiCacheController,
        allocator: PagedTokenToKVPoolAllocator,
        page_size: int,
        write_policy: str,
        load_back_threshold: int,
    ) -> None:
        """Raises InvalidValueError for a policy that is not in `WRITE_POLICIES`, a negative threshold, a page size that
        is not the host pool's, and an allocator that is not the controller's."""
        if page_size < 1:
            raise InvalidValueError("page_size", page_size, "a positive integer")
        if controller.kv.device_allocator is not allocator:
            raise InvalidValueError("allocator", allocator, "the controller's own for KV")
        if write_policy not in WRITE_POLICIES:
            raise InvalidValueError("write_policy", write_policy, f"one of {', '.join(WRITE_POLICIES)}")
        if load_back_threshold < 0:
            raise InvalidValueError("load_back_threshold", load_back_threshold, "0 or more")
        if page_size != controller.kv.host_pool.page_size:
            raise InvalidValueError("page_size", page_size, f"the host pool's, {controller.kv.host_pool.page_size}")
        self.controller = controller
        self.write_policy = write_policy
        self.load_back_threshold = load_back_threshold
        self.num_failed_backups = 0
        """Copies to the host that failed twice, since the cache was made."""
        self.num_refused_backups = 0
        """Copies to the host for which there was no room, since then; a later hit, or eviction, tries again."""
        self._ack_ids = count()

    def reset(self) -> None:
        self._end_transfers()
        self.ongoing_write_through: dict[int, BackupOperation] = {}
        self.ongoing_load_back: dict[int, TreeNode] = {}
        self._load_locks: dict[int, IncLockRefResult] = {}
        self.evictable_host_leaves = EvictionQueue(self._policy)
        super().reset()

    def _end_transfers(self) -> None:
        """Let what runs end, and forget what has been begun."""
        self.controller.reset()

    def _require_loads(self) -> None:
        """Raises TransferError after a load that failed: what should be on the device may be anything."""
        self.controller.require_loads()

    # --- match ------------------------------------------------------------------------------------------------------

    def _whole_pages(self, key: RadixKey, value: IndexArray | None) -> tuple[RadixKey, IndexArray | None]:
        self._require_loads()  # nothing is given out any more, or built upon
        return super()._whole_pages(key, value)

    def _match_result(self, used: list[TreeNode]) -> MatchResult:
        """The match that ends at the last of these nodes, or at the root: from there up to the first node that is on
        the device, and up to the first that is on the host."""
        host_hit_length, device_node = 0, used[-1] if used else self.root_node
        host_node = device_node
        while device_node.value is None:
            host_hit_length += len(device_node.key)
            assert device_node.parent is not None
            device_node = device_node.parent
        while host_node is not self.root_node and host_node.host_value is None:
            assert host_node.parent is not None
            host_node = host_node.parent
        return MatchResult(self._device_rows(used), device_node, host_node, host_node, host_hit_length)

    def _device_rows(self, path: list[TreeNode]) -> IndexArray:
        rows = [node.value for node in path if node.value is not None]
        return np.concatenate(rows) if rows else no_indices()

    # --- device to host ---------------------------------------------------------------------------------------------

    def _count_hit(self, node: TreeNode, params: InsertParams) -> None:
        self._raise_use(node, params)
        self._back_up_if_due(node, params)

    def _raise_use(self, node: TreeNode, params: InsertParams) -> None:
        """An insert uses the node."""
        node.priority = max(node.priority, params.priority)
        node.hit_count += not params.chunked and self.write_policy in _HITS_TO_BACK_UP

    def _back_up_if_due(self, node: TreeNode, params: InsertParams) -> None:
        """The insert is through with the node; if that has been used often enough, a backup is due."""
        threshold = _HITS_TO_BACK_UP.get(self.write_policy)
        if threshold is not None and not params.chunked and node.hit_count >= threshold:
            self._back_up_what_is_missing(node)

    def _back_up_what_is_missing(self, node: TreeNode) -> None:
        """The node is in such use that whatever it has on the device should be on the host, too."""
        if node.host_value is None:
            self.write_backup(node)

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        """Start to copy a node of the device to the host; its units, or 0: there is no room, or its parent has no
        host copy yet (which a write_back does not mind). Its pages stay locked until `writing_check`."""
        parent = node.parent
        assert parent is not None
        if not write_back and parent is not self.root_node and parent.host_value is None:
            return 0
        ack_id = next(self._ack_ids)
        rows = self._start_backup(node, ack_id)
        if rows is None:
            self.evict_host(len(node.key))
            rows = self._start_backup(node, ack_id)
        if rows is None:
            self.num_refused_backups += 1
            return 0
        node.host_value = rows
        node.write_through_pending_id = ack_id
        lock = None if write_back else self.inc_lock_ref(node)
        self.ongoing_write_through[ack_id] = BackupOperation(node, lock, [node])
        return len(rows)

    def _start_backup(self, node: TreeNode, ack_id: int) -> IndexArray | None:
        assert node.value is not None
        return self.controller.write(node.value, ack_id, self._get_extra_pools())

    def _get_extra_pools(self) -> list[PoolTransfer]:
        """What moves with every transfer of KV because it lives on KV's rows; nothing for most models."""
        return [
            PoolTransfer(entry.name, indices_from_pool=PoolName.KV) for entry in self.controller.group.sharing_entries()
        ]

    def writing_check(self, write_back: bool = False) -> None:
        """Take over the backups that have ended, oldest first. write_back: wait for all of them."""
        finished = self.controller.finished_writes(wait=write_back)
        _for_each([(ack_id, ack.ticket.error) for ack in finished for ack_id in ack.ids], self._end_backup)

    def flush_write_through_acks(self) -> None:
        """`writing_check` without waiting."""
        self.writing_check()

    def _end_backup(self, ack_id: int, error: Exception | None) -> None:
        operation = self.ongoing_write_through.pop(ack_id)
        try:
            self._take_over(operation, error)
        finally:
            for pool, rows in operation.discarded:
                self.controller.entry(pool).host_pool.free(rows)
            if operation.lock is not None:
                self.release(operation.lock)

    def _take_over(self, operation: BackupOperation, error: Exception | None) -> None:
        """A backup has ended, well or not."""
        if error is None:
            _for_each([(node,) for node in operation.publish], self._publish)
        else:
            log.error("backup of node %d failed: %s", operation.node.id, error)
            self.num_failed_backups += 1
            self._drop_failed_copies(operation)

    def _publish(self, node: TreeNode) -> None:
        node.write_through_pending_id = None
        self._backed_up(node)

    def _backed_up(self, node: TreeNode) -> None:
        """The node's bytes are on the host now."""
        self._record_store_event(node, StorageMedium.CPU)

    def _drop_failed_copies(self, failed: BackupOperation) -> None:
        """Take the host rows off the nodes of a failed backup, deepest first, and in write-through modes off all below
        them, whose own copies cannot have been acknowledged before. Nobody was told of any of them."""
        dropped = failed.publish
        if failed.is_locked and dropped:
            dropped = [dropped[0], *iter_nodes(dropped[0])]
        for node in [node for node in reversed(dropped) if node.host_value is not None]:
            if node.write_through_pending_id is None:
                raise CacheStateError(f"node {node.id} has a host copy older than that of node {failed.node.id} above")
            operation = self.ongoing_write_through.get(node.write_through_pending_id, failed)
            operation.publish.remove(node)
            self._discard_copy(node, operation)

    def _discard_copy(self, node: TreeNode, operation: BackupOperation) -> None:
        """Take the host rows off a node. They are free when the operation, which may still write them, has ended."""
        assert node.host_value is not None
        operation.discarded.append((PoolName.KV, node.host_value))
        node.host_value = node.write_through_pending_id = None

    # --- host to device ---------------------------------------------------------------------------------------------

    def init_load_back(self, params: InitLoadBackParams) -> tuple[IndexArray, TreeNode]:
        """Bring the match back to the device if that is worth it: the rows that KV got there, and the deepest node of
        the match that can be gone on from now; of a match that was deleted meanwhile, of what is left of it. Where
        states are needed `device_indices` may reach beyond that node: the request keeps those up to it only. Raises
        CacheStateError for a node of another tree, or from before a reset."""
        node = params.best_match_node
        rows = self.load_back(node, params.mem_quota, params.req) if self._needs_load(node) else None
        if rows is not None:
            return rows, node
        while not self._can_go_on_from(node):
            above = node.parent or node.former_parent
            assert above is not None
            node = above
        self._path_to_root(node)
        self._stay_at(node, params.req)
        return no_indices(), node

    def _needs_load(self, node: TreeNode) -> bool:
        """Whether a request that goes on from the node needs data that are on the host only."""
        return node.value is None and node.host_value is not None

    def _can_go_on_from(self, node: TreeNode) -> bool:
        """Whether the node is in the tree, with all that a request needs on the device."""
        return node.former_parent is None and node.value is not None

    def _stay_at(self, node: TreeNode, req: Request | None) -> None:
        """The request goes on from this node, and nothing is loaded for it."""

    def load_back(self, node: TreeNode, mem_quota: int | None = None, req: Request | None = None) -> IndexArray | None:
        """Give an evicted node, and the evicted ones above it, device rows; `start_loading` of the controller fills
        them. The rows, root side first, or None and nothing changed but evictions: too few units, more than
        `mem_quota` leaves, or no room."""
        nodes = self._evicted_path(node)
        extras = self._load_extras(node, req)
        ancestor = nodes[0].parent if nodes else node
        if ancestor is None or not (nodes or extras):
            return None
        host_rows = np.concatenate([no_indices(), *(n.host_value for n in nodes if n.host_value is not None)])
        lock = self.inc_lock_ref(ancestor)
        left = None if mem_quota is None else mem_quota + lock.delta
        ack_id = next(self._ack_ids)
        rows = None
        try:
            if self._is_worth_loading(len(host_rows), left, extras):
                rows = self._load_or_evict(node, host_rows, ack_id, extras)
        finally:
            self.release(lock)
        if rows is None:
            return None
        self._assign(nodes, rows)
        self._assign_extras(ack_id, node, extras, req)
        self.ongoing_load_back[ack_id] = node
        self._load_locks[ack_id] = self.inc_lock_ref(node)
        return rows

    def _is_worth_loading(self, num_units: int, quota: int | None, extras: list[PoolTransfer]) -> bool:
        """quota: device units that KV may take; None: no limit."""
        return bool(extras) or (num_units >= self.load_back_threshold and (quota is None or num_units <= quota))

    def _load_extras(self, node: TreeNode, req: Request | None) -> list[PoolTransfer]:
        """Sidecar state of the node that is loaded along, whatever the threshold and the quota say."""
        return []

    def _assign_extras(self, ack_id: int, node: TreeNode, extras: list[PoolTransfer], req: Request | None) -> None:
        """The sidecar state has got device rows, too."""

    def _evicted_path(self, node: TreeNode) -> list[TreeNode]:
        """The node and those above it that are not on the device, root side first."""
        path = []
        step: TreeNode | None = node
        while step is not None and step.value is None:
            path.append(step)
            step = step.parent
        path.reverse()
        return path

    def _load_or_evict(
        self, node: TreeNode, host_rows: IndexArray, ack_id: int, extras: list[PoolTransfer]
    ) -> IndexArray | None:
        rows = self.controller.load(host_rows, ack_id, [*extras, *self._get_extra_pools()])
        if rows is None:
            with self._host_kv_held(node):  # a write-back may look for room on the host
                self.evict(EvictParams(len(host_rows)))
            rows = self.controller.load(host_rows, ack_id, [*extras, *self._get_extra_pools()])
        if rows is None:
            log.warning("no room on the device to load %d units back", len(host_rows))
        return rows

    def _assign(self, nodes: list[TreeNode], rows: IndexArray) -> None:
        start = 0
        for node in nodes:
            self._put_on_device(node, rows[start : start + len(node.key)])
            start += len(node.key)

    def _put_on_device(self, node: TreeNode, rows: IndexArray) -> None:
        """An evicted node below one on the device gets rows of its own there."""
        assert node.parent is not None
        node.value = rows.astype(np.int64)
        node.parent.num_device_children += 1
        self._evictable_size += len(rows)
        self._update_leaf(node)
        self._update_leaf(node.parent)
        self._record_store_event(node)

    def ready_to_load_host_cache(self) -> int:
        """Start the loads that were queued; the number to wait for layers with, -1 if there are none."""
        return self.controller.start_loading()

    def loading_check(self) -> None:
        """Release the nodes whose load has ended. Raises TransferError if one failed: then the cache must be reset."""
        finished = self.controller.finished_loads()
        _for_each([(ack_id,) for ack in finished for ack_id in ack.ids], self._release_loaded)

    def _release_loaded(self, ack_id: int) -> None:
        try:
            self._end_load(ack_id, self.ongoing_load_back.pop(ack_id))
        finally:
            self.release(self._load_locks.pop(ack_id))

    def _end_load(self, ack_id: int, node: TreeNode) -> None:
        """The node, which is still locked, has its data on the device."""

    # --- eviction and locks -----------------------------------------------------------------------------------------

    def _evict_leaves(self, num_tokens: int) -> int:
        """Evict leaves of the device as the policy says, until `num_tokens` units are free or none is left that may
        go; the units."""
        leaves, before, promised = self.evictable_leaves, self._evictable_size, 0
        looked_at: dict[TreeNode, None] = {}
        waiting: dict[TreeNode, None] = {}  # on the device until their backups, or those of nodes below, are done
        num_waiting_below: Counter[TreeNode] = Counter()
        try:
            while before - self._evictable_size + promised < num_tokens and (leaf := leaves.pop()) is not None:
                if leaf in looked_at:  # what it was refused for has changed meanwhile: it has its turn next time
                    continue
                looked_at[leaf] = None
                left = self._evict_or_wait(leaf, waiting)
                if left is None:
                    continue
                if leaf in waiting:
                    promised += len(leaf.key)
                    num_waiting_below[left] += 1
                if left.lock_ref == 0 and left.num_device_children == num_waiting_below[left]:
                    leaves.add(left)
            self._evict_waiting(waiting)
        finally:
            self._put_back(looked_at)
        return before - self._evictable_size

    def _put_back(self, looked_at: Iterable[TreeNode]) -> None:
        """Let the queues hold those of the nodes that stay, and their parents, if and only if they belong there."""
        for node in looked_at:
            if node.parent is not None:
                self._update_leaf(node)
                self._update_leaf(node.parent)

    def _evict_or_wait(self, leaf: TreeNode, waiting: dict[TreeNode, None]) -> TreeNode | None:
        """Evict the leaf or note it in `waiting`; the node that is left above it, or None when the leaf has to stay
        for want of room on the host."""
        parent = leaf.parent
        if leaf.host_value is None and self.write_policy != "write_back":
            return self._evict_regular(leaf)
        if leaf.host_value is not None and leaf.write_through_pending_id is None and self._is_evictable_leaf(leaf):
            self._evict_backuped(leaf)
        elif leaf.host_value is not None or self.write_backup(leaf, write_back=True):
            waiting[leaf] = None
        else:
            return None
        return parent

    def _evict_waiting(self, waiting: dict[TreeNode, None]) -> None:
        """Wait for the backups and evict what has a host copy now; what has none stays, since its copy failed."""
        if waiting:
            self.writing_check(write_back=True)
        for node in waiting:
            if node.host_value is not None and self._is_evictable_leaf(node):
                self._evict_backuped(node)

    def _evict_regular(self, leaf: TreeNode) -> TreeNode:
        """A leaf without a host copy goes; the node that is left above it."""
        return self._delete_leaf(leaf)

    def _evict_backuped(self, node: TreeNode) -> None:
        """The node leaves the device and stays on the host."""
        assert node.value is not None
        assert node.parent is not None
        self._record_remove_event(node)
        self._free(node.value)
        self._evictable_size -= len(node.value)
        node.value = None
        node.parent.num_device_children -= 1
        self._update_leaf(node)
        self._update_leaf(node.parent)

    def evict_host(self, num_tokens: int) -> int:
        """Delete nodes that are on the host only, until `num_tokens` units of host rows are free or none is left that
        may go; the units."""
        leaves, pool = self.evictable_host_leaves, self.controller.kv.host_pool
        before = pool.available_size()
        while pool.available_size() - before < num_tokens and (leaf := leaves.pop()) is not None:
            self._evict_host_leaf(leaf)
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

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        self._require_on_device(node)
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: TreeNode) -> DecLockRefResult:
        self._require_on_device(node)
        return super().dec_lock_ref(node)

    def _require_on_device(self, node: TreeNode) -> None:
        if node.value is None:
            raise CacheStateError(f"node {node.id} is not on the device, it cannot be locked or unlocked")

    def _touch(self, path: list[TreeNode]) -> None:
        super()._touch(path)
        self.evictable_host_leaves.used(path)

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

    def _update_leaf(self, node: TreeNode) -> None:
        super()._update_leaf(node)
        self._update_host_leaf(node)

    def _update_host_leaf(self, node: TreeNode) -> None:
        is_on_host_only = node.value is None and node.host_value is not None
        if is_on_host_only and not node.children and node.host_ref_counter == 0:
            self.evictable_host_leaves.add(node)
        else:
            self.evictable_host_leaves.discard(node)

    def _split_node(self, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(child, split_len)
        upper.host_value, child.host_value = split_rows(child.host_value, split_len)
        pending = upper.write_through_pending_id = child.write_through_pending_id
        if pending is not None:
            publish = self.ongoing_write_through[pending].publish
            publish.insert(publish.index(child), upper)
        return upper


def _for_each(calls: Sequence[tuple[Any, ...]], action: Callable[..., None]) -> None:
    """Call `action` with each of the argument lists, in order and to the end, whatever it raises; all of that is
    logged, and the first exception raised in the end."""
    failed: Exception | None = None
    for arguments in calls:
        try:
            action(*arguments)
        except Exception as error:  # no part of the tree may be left waiting for what went wrong at another
            log.exception("the end of a transfer could not be taken over")
            failed = failed or error
    if failed is not None:
        raise failed


def live_prefix(path: list[TreeNode]) -> list[TreeNode]:
    """Leading nodes that are on a tier: a match must not walk through others."""
    return list(takewhile(lambda node: node.value is not None or node.host_value is not None, path))
