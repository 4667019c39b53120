"""Backups: copies of device data on the host.

    on device only ── write ──> pending ── writing_check ──> on both tiers, published
                   └─ KV was copied before ── write_late ──┘

A node is backed up when its hits reach a threshold (write-through) or when it is evicted (write-back). In write-through
modes the nodes with a host copy always form a prefix, like those on the device. A state is copied together with the KV
of its node, in one operation. A state that arrives later is copied alone. A copy becomes valid when it is acknowledged.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_cache.base import IncLockRefResult
from engine_cache.components.component import AuxiliaryComponent
from engine_cache.errors import CacheStateError
from engine_cache.storage.base import PoolName, PoolTransfer
from engine_cache.tiers.host_leaves import HostLeaves
from engine_cache.tiers.transfer import Ack
from engine_cache.tree.node import TreeNode, iter_nodes
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium

logger = logging.getLogger(__name__)

_HITS_TO_BACK_UP = {"write_through": 1, "write_through_selective": 2}
WRITE_POLICIES = (*_HITS_TO_BACK_UP, "write_back")


@dataclass(slots=True, eq=False)
class BackupOperation:
    """A backup that has not been acknowledged."""

    node: TreeNode
    lock: IncLockRefResult | None
    """The lock on the node until the backup ends. None if the operation is a write-back."""
    publish: list[TreeNode]
    """The node and the nodes split off it, parents first, whose KV is copied. Empty if only late data is copied."""
    parts: list[tuple[AuxiliaryComponent, TreeNode]] = field(default_factory=list)
    """Data of other kinds that is copied, and the nodes that hold it."""
    discarded: list[tuple[PoolName, IndexArray]] = field(default_factory=list)
    """Host rows that the copy still writes to, although no node holds them any longer."""


class Backups:
    """The backups of one cache."""

    def __init__(self, leaves: HostLeaves, write_policy: str) -> None:
        if write_policy not in WRITE_POLICIES:
            raise InvalidValueError("write_policy", write_policy, f"one of {', '.join(WRITE_POLICIES)}")
        self.write_policy = write_policy
        self.ongoing: dict[int, BackupOperation] = {}
        self.num_failed = 0
        """Number of copies that failed twice."""
        self.num_refused = 0
        """Number of copies for which the host had no room. They are tried again at a later hit or eviction."""
        self.archive: Callable[[TreeNode, Sequence[AuxiliaryComponent] | None], None] | None = None
        """Archives a node that has arrived on the host, or data of these kinds that arrived after its KV."""
        self._leaves = leaves
        self._device = leaves.device
        self._tree = leaves.device.tree
        self._components = leaves.device.components
        self._controller = leaves.controller

    @property
    def counts_hits(self) -> bool:
        """Whether hits trigger backups. Hits are not counted with write-back."""
        return self.write_policy in _HITS_TO_BACK_UP

    def back_up_if_due(self, node: TreeNode) -> None:
        """Back up the data that a node has on the device only, if the node has enough hits."""
        if not self._is_due(node):
            return
        parent = node.parent
        assert parent is not None
        if parent.host_value is None and self._is_due(parent):
            return  # the backup of the parent was refused before for lack of room
        if node.host_value is None:
            self.write(node)
        is_pending = node.write_through_pending_id is not None
        if node.host_value is not None and not (is_pending and self._device.variant.late_states_wait):
            self.write_late(node)

    def _is_due(self, node: TreeNode) -> bool:
        threshold = _HITS_TO_BACK_UP.get(self.write_policy)
        return threshold is not None and node.hit_count >= threshold

    def write(self, node: TreeNode, write_back: bool = False) -> int:
        """Start to copy a device node to the host. See `TreeCache.write_backup`."""
        parent = node.parent
        assert parent is not None
        if not write_back and parent.host_value is None and parent is not self._tree.root:
            above = [step for step in self._tree.path_to_root(node)[:0:-1] if step.host_value is None]
            if not self._device.variant.backs_up_parents or not all(self._copy(step) for step in above):
                return 0
        return len(node.key) if self._copy(node, write_back=write_back) else 0

    def write_late(self, node: TreeNode) -> bool:
        """Start to copy the data that arrived at a node after its KV was copied to the host.

        Returns False if there is no such data or the host has no room. The node stays locked until `writing_check`. No
        KV event is recorded.
        """
        return node.host_value is not None and bool(self._not_on_host(node)) and self._copy(node)

    def _not_on_host(self, node: TreeNode) -> list[AuxiliaryComponent]:
        data = [(each, each.data(node)) for each in self._components]
        return [each for each, held in data if held.value is not None and held.host_value is None]

    def _copy(self, node: TreeNode, *, write_back: bool = False) -> bool:
        """Start to copy what is not on the host yet: KV, unless it was copied before, and data of other kinds."""
        assert node.value is not None
        kv = node.value if node.host_value is None else no_indices()
        ack_id, parts = next(self._leaves.ids), self._not_on_host(node)
        transfers = [PoolTransfer(each.pool, device_indices=each.data(node).value) for each in parts]
        node.host_ref_counter += 1  # so that making room does not delete a tombstone without children
        try:
            rows = self._controller.write(kv, ack_id, transfers)
            if rows is None and len(kv):
                self._leaves.evict(self._leaves.units_to_evict(len(kv)))
                rows = self._controller.write(kv, ack_id, transfers)
        finally:
            node.host_ref_counter -= 1
        if rows is None:
            self.num_refused += 1
            return False
        for component, transfer in zip(parts, transfers, strict=True):
            assert transfer.host_indices is not None
            component.lock_host(node)
            component.put_on_host(node, transfer.host_indices)
            component.data(node).pending_id = ack_id
        if len(kv):
            node.host_value, node.write_through_pending_id = rows, ack_id
        lock, publish = None if write_back else self._device.lock(node), [node] if len(kv) else []
        self.ongoing[ack_id] = BackupOperation(node, lock, publish, [(each, node) for each in parts])
        return True

    def writing_check(self, write_back: bool = False) -> None:
        """Process finished backups, oldest first. write_back: wait for all of them."""
        self._end_all(self._controller.finished_writes(wait=write_back))

    def wait_for(self, ack_id: int) -> None:
        """Wait for a backup, and process it and the older ones."""
        self._end_all(self._controller.finished_writes(wait_for=ack_id))

    def _end_all(self, finished: list[Ack]) -> None:
        for_each([(ack_id, ack.ticket.error) for ack in finished for ack_id in ack.ids], self._end)

    def _end(self, ack_id: int, error: Exception | None) -> None:
        operation = self.ongoing.pop(ack_id)
        try:
            if error is None:
                self._publish(operation)
            else:
                logger.error("backup of node %d failed: %s", operation.node.id, error)
                self.num_failed += 1
                self._drop_failed(operation)
        finally:
            for pool, rows in operation.discarded:
                self._controller.group.entry(pool).host_pool.free(rows)
            if operation.lock is not None:
                self._device.unlock(operation.lock.node, operation.lock.tickets)

    def _publish(self, operation: BackupOperation) -> None:
        for component, node in operation.parts:
            component.data(node).pending_id = None
            component.unlock_host(node)
            component.record_on_host(node)
        if operation.publish:
            for_each([(node,) for node in operation.publish], self._publish_node)
        elif self.archive is not None:
            for node in dict.fromkeys(node for _, node in operation.parts):
                self.archive(node, [each for each, holder in operation.parts if holder is node])

    def _publish_node(self, node: TreeNode) -> None:
        node.write_through_pending_id = None
        self._device.events.store(node, StorageMedium.CPU)
        if self.archive is not None:
            self.archive(node, None)

    def _drop_failed(self, failed: BackupOperation) -> None:
        """Remove the host rows of a failed backup from its nodes, deepest first.

        In write-through modes, the copies of all nodes below are removed as well. They cannot have been acknowledged
        before the failed one, so no event has reported any of these copies.
        """
        for component, node in failed.parts if not failed.publish else ():
            self._discard_part(component, node, failed)
        dropped = failed.publish
        if failed.lock is not None and dropped:
            dropped = [dropped[0], *iter_nodes(dropped[0])]
        for node in [node for node in reversed(dropped) if node.host_value is not None]:
            if node.write_through_pending_id is None:
                raise CacheStateError(f"node {node.id} has a host copy older than that of node {failed.node.id} above")
            operation = self.ongoing.get(node.write_through_pending_id, failed)
            operation.publish.remove(node)
            self._discard_copy(node, operation)

    def _discard_copy(self, node: TreeNode, operation: BackupOperation) -> None:
        """Remove all host rows from a node. KV rows are freed when `operation`, which may write to them, has ended."""
        for component in self._components:
            pending = component.data(node).pending_id
            if pending is None:
                component.free_on_host(node)
            else:
                copying = operation if pending == node.write_through_pending_id else self.ongoing[pending]
                copying.parts.remove((component, node))
                self._discard_part(component, node, copying)
        assert node.host_value is not None
        operation.discarded.append((PoolName.KV, node.host_value))
        node.host_value = node.write_through_pending_id = None

    def _discard_part(self, component: AuxiliaryComponent, node: TreeNode, operation: BackupOperation) -> None:
        rows = component.take_from_host(node)
        assert rows is not None
        operation.discarded.append((component.pool, rows))
        component.data(node).pending_id = None
        component.unlock_host(node)

    def touched(self, path: Sequence[TreeNode]) -> None:
        """Do nothing: backups do not depend on the order of use."""

    def was_split(self, upper: TreeNode, lower: TreeNode, split_len: int) -> None:
        """Add the upper part of a node that is being copied to the operation. Components handle the split first."""
        if upper.write_through_pending_id is not None:
            publish = self.ongoing[upper.write_through_pending_id].publish
            publish.insert(publish.index(lower), upper)
        for component in self._components:
            pending = component.data(upper).pending_id
            if pending is not None:
                parts = self.ongoing[pending].parts
                parts.insert(parts.index((component, lower)), (component, upper))


def for_each(calls: Sequence[tuple[Any, ...]], action: Callable[..., None]) -> None:
    """Call `action` with each of the argument lists, in order.

    An exception does not stop the other calls. All exceptions are logged, and the first is raised at the end.
    """
    failed: Exception | None = None
    for arguments in calls:
        try:
            action(*arguments)
        except Exception as error:  # an error at one node must not leave the others unprocessed
            logger.exception("the end of a transfer could not be processed")
            failed = failed or error
    if failed is not None:
        raise failed
