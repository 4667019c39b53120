"""Transfers of a unified tree: what its components hold moves along with KV between device, host and store."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from engine_cache.base import DecLockRefParams, InitLoadBackParams, Request
from engine_cache.storage.base import PoolTransfer
from engine_cache.storage.object_names import page_keys
from engine_cache.storage_operations import ArchiveOperation, PrefetchOperation, StorageOperation
from engine_cache.tiers.backup import BackupOperation
from engine_cache.tree.node import TreeNode, compute_node_hash_values
from engine_cache.types import IndexArray, no_indices
from engine_cache.unified.component import AuxiliaryComponent
from engine_cache.unified.node import UnifiedNode, unified
from engine_cache.unified.one_tier import OptionalHostTier
from kv_events.errors import InvalidValueError


@dataclass(slots=True, eq=False)
class AuxiliaryBackup(BackupOperation):
    """A copy to the host of what components hold at a node whose KV has gone before: there is nothing to publish."""

    parts: list[tuple[AuxiliaryComponent, UnifiedNode]] = field(default_factory=list)
    """What is copied, nodes split off meanwhile included."""


class UnifiedTransfers(OptionalHostTier):
    """What is backed up, loaded back, archived and prefetched."""

    def reset(self) -> None:
        self._host_locks: dict[StorageOperation, DecLockRefParams] = {}
        super().reset()

    # --- device to host ---------------------------------------------------------------------------------------------

    def _back_up_what_is_missing(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None
        if self.cache_controller is None or (parent.host_value is None and self._is_due(parent)):
            return  # the parent had its turn in this insert, and found no room
        super()._back_up_what_is_missing(node)
        if node.host_value is not None and node.write_through_pending_id is None:
            self.write_auxiliary_backup(node)

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        """As in `HostTier`, but parents without a host copy are backed up first, unless it is a write-back."""
        above: list[TreeNode] = []
        step = node.parent
        while not write_back and step is not None and step.parent is not None and step.host_value is None:
            above.append(step)
            step = step.parent
        if not all(super(UnifiedTransfers, self).write_backup(missing) for missing in reversed(above)):
            return 0
        return super().write_backup(node, write_back)

    def _wanted_on_host(self, num_units: int) -> int:
        """What is missing, no more."""
        return num_units - self.controller.kv.host_pool.available_size()

    def _start_backup(self, node: TreeNode, ack_id: int) -> IndexArray | None:
        assert node.value is not None
        parts = self._not_on_host(unified(node))
        extras = [PoolTransfer(each.pool, device_indices=each.data(node).value) for each in parts]
        rows = self.controller.write(node.value, ack_id, [*extras, *self._get_extra_pools()])
        if rows is not None:
            self._put_on_host(unified(node), parts, extras)
        return rows

    def _not_on_host(self, node: UnifiedNode) -> list[AuxiliaryComponent]:
        on_device = [each for each in self.auxiliaries if each.data(node).value is not None]
        return [each for each in on_device if each.data(node).host_value is None]

    def _put_on_host(self, node: UnifiedNode, parts: list[AuxiliaryComponent], transfers: list[PoolTransfer]) -> None:
        for component, transfer in zip(parts, transfers, strict=True):
            assert transfer.host_indices is not None
            component.put_on_host(node, transfer.host_indices)

    def write_auxiliary_backup(self, node: TreeNode) -> bool:
        """Start to copy what has come to a node since its KV went to the host. False: there is nothing, or no room.

        It stays locked until `writing_check`. None of it is an event.
        """
        unified_node = unified(node)
        parts = self._not_on_host(unified_node)
        if self.cache_controller is None or not parts:
            return False
        transfers = [PoolTransfer(each.pool, device_indices=each.data(node).value) for each in parts]
        ack_id = next(self._ack_ids)
        if self.controller.write(no_indices(), ack_id, transfers) is None:
            self.num_refused_backups += 1
            return False
        self._put_on_host(unified_node, parts, transfers)
        for component in parts:
            component.data(node).pending_id = ack_id
        listed = [(component, unified_node) for component in parts]
        self.ongoing_write_through[ack_id] = AuxiliaryBackup(node, self.inc_lock_ref(node), [], parts=listed)
        return True

    def _split_auxiliary_backups(self, upper: UnifiedNode, lower: UnifiedNode) -> None:
        for component in self.auxiliaries:
            pending = component.data(lower).pending_id
            if pending is not None and component.data(upper).host_value is not None:
                component.data(upper).pending_id = pending
                operation = self.ongoing_write_through[pending]
                assert isinstance(operation, AuxiliaryBackup)
                operation.parts.append((component, upper))

    def _take_over(self, operation: BackupOperation, error: Exception | None) -> None:
        if isinstance(operation, AuxiliaryBackup):
            self._end_auxiliary_backup(operation, error)
        super()._take_over(operation, error)

    def _end_auxiliary_backup(self, operation: AuxiliaryBackup, error: Exception | None) -> None:
        for component, node in operation.parts:
            component.data(node).pending_id = None
            if error is not None:
                self._discard_on_host(component, node, operation)
            component.tell_of_host(node)
        if error is None and self.storage is not None:
            for node in dict.fromkeys(node for _, node in operation.parts):
                parts = [component for component, part in operation.parts if part is node]
                self._archive(ArchiveOperation(node, [], no_indices(), self._archive_transfers(node, parts)))

    def _backed_up(self, node: TreeNode) -> None:
        for component in self.auxiliaries:
            component.tell_of_host(unified(node))
        super()._backed_up(node)

    def _discard_copy(self, node: TreeNode, operation: BackupOperation) -> None:
        for component in self.auxiliaries:
            self._discard_on_host(component, unified(node), operation)
        super()._discard_copy(node, operation)

    def _discard_on_host(self, component: AuxiliaryComponent, node: UnifiedNode, operation: BackupOperation) -> None:
        rows = component.take_from_host(node)
        if rows is not None:
            operation.discarded.append((component.pool, rows))

    # --- host to device ---------------------------------------------------------------------------------------------

    def init_load_back(self, params: InitLoadBackParams) -> tuple[IndexArray, TreeNode]:
        """Bring what the match lacks back to the device: the rows by which the request's prefix grows, and the node it
        goes on from then. `req.last_node` must be the match's device node, locked; if nothing was gained the request
        stays there. Raises InvalidValueError without a request, or if that node is not above the match, and
        PoolExhaustedError without a slot for the state that the request starts from."""
        node, req = params.best_match_node, params.req
        if req is None or req.last_node is None:
            raise InvalidValueError("req", req, "a request with a last_node")
        anchor = req.last_node
        added = self._path_below(anchor, node) if node.former_parent is None else []
        is_wanted = node.value is None or params.host_hit_length > 0
        if is_wanted or req.swa_host_hit_length > 0 or req.mamba_host_hit_length > 0:
            for component in self.auxiliaries:
                component.prepare_load(unified(node), req)
            if self._is_usable(node) and self.load_back(node, params.mem_quota, req) is not None:
                rows = self._collect_new_prefix_indices(added)
                return rows, node if len(rows) else anchor
            for component in self.auxiliaries:
                component.refuse_load(anchor, req)
        return no_indices(), anchor

    @abstractmethod
    def _is_usable(self, node: TreeNode) -> bool:
        """Whether a match may still end at a node: since the last one it may have lost data, or left the tree."""

    def _path_below(self, anchor: TreeNode, node: TreeNode) -> list[TreeNode]:
        """Nodes on the way from `anchor`, which is left out, down to `node`."""
        path = []
        step: TreeNode | None = node
        while step is not anchor:
            if step is None:
                raise InvalidValueError("req.last_node", f"node {anchor.id}", f"a node on the way to node {node.id}")
            path.append(step)
            step = step.parent
        path.reverse()
        return path

    def _collect_new_prefix_indices(self, added: list[TreeNode]) -> IndexArray:
        """Device rows by which the prefix has grown."""
        rows = [node.value for node in added if node.value is not None]
        assert len(rows) == len(added), "a node was loaded, but is not on the device"
        return np.concatenate([no_indices(), *rows])

    def _is_worth_loading(self, num_units: int, quota: int | None, extras: list[PoolTransfer]) -> bool:
        is_enough = bool(extras) or num_units >= self.load_back_threshold
        return is_enough and (quota is None or num_units <= quota)

    def _load_extras(self, node: TreeNode, req: Request | None) -> list[PoolTransfer]:
        return [transfer for each in self.auxiliaries for transfer in each.load_transfers(unified(node), req)]

    def _load_or_evict(
        self, node: TreeNode, host_rows: IndexArray, ack_id: int, extras: list[PoolTransfer]
    ) -> IndexArray | None:
        """Whatever makes room must not take what the load needs, on either tier."""
        needed = [(each, step) for each in self.auxiliaries for step in each.needed_nodes(unified(node))]
        on_device = [(each, step) for each, step in needed if each.data(step).value is not None]
        on_host = [(each, step) for each, step in needed if each.data(step).host_value is not None]
        self._hold_host_kv(node)
        for component, step in on_device:
            component.lock(step)
        for component, step in on_host:
            component.lock_host(step)
        try:
            return super()._load_or_evict(node, host_rows, ack_id, extras)
        finally:
            self._release_host_kv(node)
            for component, step in on_device:
                component.unlock(step)
            for component, step in on_host:
                component.unlock_host(step)

    def _wanted_on_device(self, num_units: int) -> int:
        """What is missing, no more."""
        assert self.allocator is not None
        return num_units - self.allocator.available_size()

    def _assign_extras(self, ack_id: int, node: TreeNode, extras: list[PoolTransfer], req: Request | None) -> None:
        for component in self.auxiliaries:
            transfers = [transfer for transfer in extras if transfer.name is component.pool]
            component.commit_load(unified(node), transfers, req)

    # --- storage ----------------------------------------------------------------------------------------------------

    def _archive_extras(self, node: TreeNode) -> list[PoolTransfer]:
        on_host = [each for each in self.auxiliaries if each.data(node).host_value is not None]
        filled = [each for each in on_host if each.data(node).pending_id is None]
        return [*self._archive_transfers(unified(node), filled), *super()._archive_extras(node)]

    def _archive_transfers(self, node: UnifiedNode, parts: list[AuxiliaryComponent]) -> list[PoolTransfer]:
        if not parts:
            return []
        keys = page_keys(compute_node_hash_values(node, self.page_size), node.key.extra_key)
        return [component.archive_transfer(node, keys) for component in parts]

    def _hold_extras(self, operation: StorageOperation, node: TreeNode) -> None:
        self._host_locks[operation] = self._hold_on_host(unified(node))

    def _release_extras(self, operation: StorageOperation, node: TreeNode) -> None:
        self._let_go_on_host(unified(node), self._host_locks.pop(operation))

    def _prefetch_extras(self, anchor: TreeNode, num_units: int) -> list[PoolTransfer] | None:
        """None also if nothing that could be matched would come of it."""
        extras: list[PoolTransfer] = []
        with ExitStack() as held, ExitStack() as undo:
            for component in self.auxiliaries:
                transfer = component.prefetch_transfer(unified(anchor), num_units // self.page_size)
                if transfer is None:
                    return None
                ticket = component.acquire_host(unified(anchor)) if component.builds_on_anchor else None
                if ticket is not None:
                    held.callback(component.release_host, unified(anchor), ticket)
                pool = component.entry.host_pool
                rows = component.entry.alloc_host(len(transfer.keys or ()) * pool.page_size)
                if rows is None:
                    return None
                undo.callback(pool.free, rows)
                transfer.host_indices = rows
                extras.append(transfer)
            shared = super()._prefetch_extras(anchor, num_units)
            if shared is None:
                return None
            undo.pop_all()
        return [*extras, *shared]

    def _take_extras(self, operation: PrefetchOperation, end: TreeNode) -> None:
        for transfer in operation.extras:
            for component in self.auxiliaries:
                if component.pool is transfer.name:
                    component.commit_prefetch(unified(end), transfer, operation)
