"""Backups: copies of device pages on the host, and when they may be told to the router.

A node is backed up when its hits reach a threshold (write-through) or when it is evicted (write-back). In write-through
modes what has a host copy is always a prefix, as what is on the device is. A copy counts when it is acknowledged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_cache.base import IncLockRefResult, InsertParams
from engine_cache.errors import CacheStateError
from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.tiers.host_leaves import HostLeaves
from engine_cache.transfer import Ack
from engine_cache.tree.node import TreeNode, iter_nodes, split_rows
from engine_cache.types import IndexArray
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


class Backups(HostLeaves):
    """What goes from the device to the host, and what becomes of it."""

    write_policy: str
    num_failed_backups = 0
    """Copies to the host that failed twice, since the cache was made."""
    num_refused_backups = 0
    """Copies to the host for which there was no room, since then; a later hit, or eviction, tries again."""
    _ack_ids: Iterator[int]  # what the tree calls its transfers

    def reset(self) -> None:
        self.ongoing_write_through: dict[int, BackupOperation] = {}
        super().reset()

    def _count_hit(self, node: TreeNode, params: InsertParams) -> None:
        self._raise_use(node, params)
        self._back_up_if_due(node, params)

    def _raise_use(self, node: TreeNode, params: InsertParams) -> None:
        """An insert uses the node."""
        node.priority = max(node.priority, params.priority)
        node.hit_count += not params.chunked and self.write_policy in _HITS_TO_BACK_UP

    def _back_up_if_due(self, node: TreeNode, params: InsertParams) -> None:
        """The insert is through with the node; if that has been used often enough, a backup is due."""
        if not params.chunked and self._is_due(node):
            self._back_up_what_is_missing(node)

    def _is_due(self, node: TreeNode) -> bool:
        threshold = _HITS_TO_BACK_UP.get(self.write_policy)
        return threshold is not None and node.hit_count >= threshold

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
            self.evict_host(self._wanted_on_host(len(node.key)))
            rows = self._start_backup(node, ack_id)
        if rows is None:
            self.num_refused_backups += 1
            return 0
        node.host_value = rows
        node.write_through_pending_id = ack_id
        lock = None if write_back else self.inc_lock_ref(node)
        self.ongoing_write_through[ack_id] = BackupOperation(node, lock, [node])
        return len(rows)

    def _wanted_on_host(self, num_units: int) -> int:
        """Units to evict from the host to make room for a backup of so many."""
        return num_units

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
        self._end_backups(self.controller.finished_writes(wait=write_back))

    def _await_backup(self, ack_id: int) -> None:
        """Wait for one backup and for those that were started before it."""
        self._end_backups(self.controller.finished_writes(wait_for=ack_id))

    def _end_backups(self, finished: list[Ack]) -> None:
        for_each([(ack_id, ack.ticket.error) for ack in finished for ack_id in ack.ids], self._end_backup)

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
            for_each([(node,) for node in operation.publish], self._publish)
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

    def _split_node(self, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(child, split_len)
        upper.host_value, child.host_value = split_rows(child.host_value, split_len)
        pending = upper.write_through_pending_id = child.write_through_pending_id
        if pending is not None:
            publish = self.ongoing_write_through[pending].publish
            publish.insert(publish.index(child), upper)
        return upper


def for_each(calls: Sequence[tuple[Any, ...]], action: Callable[..., None]) -> None:
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
