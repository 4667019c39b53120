"""Recurrent states between device, host and store.

    on device only ── with KV: write_backup ────────> pending ── writing_check ──> on both ──> in the store
                   └─ KV went before: write_state_backup ──┘

A state moves along with the KV of its node, in one operation, all or nothing; one that comes to a node whose KV is on
the host already follows by itself. None of it is an event of KV; a group's event says of a state on the host what one
of KV does: that it was acknowledged.
"""

from __future__ import annotations

import logging

from engine_cache.base import Request
from engine_cache.mamba import MambaRadixCache
from engine_cache.pool_entry import PoolEntry
from engine_cache.storage.base import PoolHitPolicy, PoolName, PoolTransfer
from engine_cache.storage.object_names import page_keys
from engine_cache.storage_operations import ArchiveOperation, PrefetchOperation, StorageOperation
from engine_cache.tiers.backup import BackupOperation
from engine_cache.tiers.storage_tier import StorageTier
from engine_cache.tree.events import LAST_PAGE
from engine_cache.tree.lru import LruList
from engine_cache.tree.node import MambaNode, TreeNode, compute_node_hash_values, hybrid
from engine_cache.types import IndexArray, no_indices
from kv_events.schema import StorageMedium
from kv_events.streams import MAMBA_GROUP

log = logging.getLogger(__name__)

_HOST_MAMBA_LIST = 1
_DRAIN_TIMEOUT_S = 30.0


class StateBackup(BackupOperation):
    """The copy of a state to the host, to which the KV of its node has gone before: there is nothing to publish."""


class StateTier(StorageTier, MambaRadixCache):
    """What a cache with states and tiers does with a state on its way between them. All of it runs on the thread that
    owns the cache."""

    _states: PoolEntry

    def reset(self) -> None:
        if not self.controller.engine.drain(_DRAIN_TIMEOUT_S):
            log.warning("transfers still run %g s after a reset, which waits for them", _DRAIN_TIMEOUT_S)
        self.host_mamba_lru_list = LruList[MambaNode](_HOST_MAMBA_LIST)
        super().reset()

    # --- device to host ---------------------------------------------------------------------------------------------

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        with self._host_kv_held(node):  # what makes room on the host must not take a tombstone that lost its children
            return super().write_backup(node, write_back)

    def _back_up_what_is_missing(self, node: TreeNode) -> None:
        super()._back_up_what_is_missing(node)
        self.write_state_backup(node)

    def write_state_backup(self, node: TreeNode) -> bool:
        """Start to copy the state of a node whose KV has a host copy, acknowledged or not, to the host. False: there is
        nothing to copy, or no room. A state that is there is never written again: the prefix says what it is.

        Node and slot stay until `writing_check`; until then it does not count as being on the host.
        """
        state = hybrid(node)
        if node.host_value is None or state.mamba_value is None or state.mamba_host_value is not None:
            return False
        ack_id = next(self._ack_ids)
        copy = PoolTransfer(PoolName.MAMBA, device_indices=state.mamba_value)
        if self.controller.write(no_indices(), ack_id, [copy]) is None:
            self.num_refused_backups += 1
            return False
        self._hold_host_state(state)
        state.mamba_host_value, state.mamba_pending_id = copy.host_indices, ack_id
        self.ongoing_write_through[ack_id] = StateBackup(node, self.inc_lock_ref(node), [])
        return True

    def _start_backup(self, node: TreeNode, ack_id: int) -> IndexArray | None:
        state = hybrid(node)
        assert node.value is not None
        extras = []
        if state.mamba_value is not None:
            extras.append(PoolTransfer(PoolName.MAMBA, device_indices=state.mamba_value))
        rows = self.controller.write(node.value, ack_id, extras)
        if rows is not None and extras:
            state.mamba_host_value = extras[0].host_indices
            self._hold_host_state(state)
        return rows

    def _take_over(self, operation: BackupOperation, error: Exception | None) -> None:
        if isinstance(operation, StateBackup) and not operation.discarded:
            self._end_state_backup(operation, error)
        super()._take_over(operation, error)

    def _end_state_backup(self, operation: StateBackup, error: Exception | None) -> None:
        state = hybrid(operation.node)
        if error is not None:
            self._discard_host_state(state, operation)
            return
        state.mamba_pending_id = None
        self._release_host_state(state)
        self._record_host_state(state)
        if self.storage is not None:  # where KV has gone before
            self._archive(ArchiveOperation(state, [], no_indices(), self._archive_extras(state)))

    def _backed_up(self, node: TreeNode) -> None:
        state = hybrid(node)
        if state.mamba_host_value is not None and state.mamba_pending_id is None:
            self._release_host_state(state)
            self._record_host_state(state)
        super()._backed_up(node)

    def _record_host_state(self, node: MambaNode) -> None:
        """The host slot of a node is filled."""
        self._record_group_store(MAMBA_GROUP, node, StorageMedium.CPU, LAST_PAGE)

    def _discard_copy(self, node: TreeNode, operation: BackupOperation) -> None:
        super()._discard_copy(node, operation)
        state = hybrid(node)
        if state.mamba_pending_id is not None:
            operation = self.ongoing_write_through[state.mamba_pending_id]
        if state.mamba_host_value is not None:
            self._discard_host_state(state, operation)

    def _discard_host_state(self, node: MambaNode, operation: BackupOperation) -> None:
        """Take the host slot off a node. It is free when the operation, which may still write it, has ended."""
        assert node.mamba_host_value is not None
        operation.discarded.append((PoolName.MAMBA, node.mamba_host_value))
        node.mamba_host_value = node.mamba_pending_id = None
        self._release_host_state(node)

    def _hold_host_state(self, node: MambaNode) -> None:
        """Keep the host slot of a node, or one that it may yet get, until `_release_host_state`."""
        node.host_mamba_ref_counter += 1
        if node in self.host_mamba_lru_list:
            self.host_mamba_lru_list.remove(node)

    def _release_host_state(self, node: MambaNode) -> None:
        node.host_mamba_ref_counter -= 1
        if node.host_mamba_ref_counter == 0 and node.mamba_host_value is not None:
            self.host_mamba_lru_list.append(node)

    # --- host to device ---------------------------------------------------------------------------------------------

    def _needs_load(self, node: TreeNode) -> bool:
        state = hybrid(node)
        return state.mamba_value is None and state.mamba_host_value is not None

    def _can_go_on_from(self, node: TreeNode) -> bool:
        has_state = hybrid(node).mamba_value is not None or node is self.root_node
        return has_state and super()._can_go_on_from(node)

    def _stay_at(self, node: TreeNode, req: Request | None) -> None:
        """It starts from a copy of the node's state. Raises PoolExhaustedError without a slot for that."""
        super()._stay_at(node, req)
        if req is not None:
            self.copy_on_write(req, hybrid(node).mamba_value, [node])

    def _load_extras(self, node: TreeNode, req: Request | None) -> list[PoolTransfer]:
        state = hybrid(node)
        slot = state.mamba_host_value
        if state.mamba_value is not None or slot is None:
            return []
        extras = [PoolTransfer(PoolName.MAMBA, host_indices=slot)]
        if req is not None:
            extras.append(PoolTransfer(PoolName.MAMBA, host_indices=slot, device_indices=req.mamba_pool_idx))
        return extras

    def _load_or_evict(
        self, node: TreeNode, host_rows: IndexArray, ack_id: int, extras: list[PoolTransfer]
    ) -> IndexArray | None:
        self._hold_host_state(hybrid(node))
        rows = None
        try:
            with self._host_kv_held(node):  # room for the state may demote others, which look for room on the host
                rows = super()._load_or_evict(node, host_rows, ack_id, extras)
        finally:
            if rows is None:
                self._release_host_state(hybrid(node))
        return rows

    def _assign_extras(self, ack_id: int, node: TreeNode, extras: list[PoolTransfer], req: Request | None) -> None:
        if extras and extras[0].device_indices is not None:
            self._attach_state(hybrid(node), extras[0].device_indices)
            self._touch([node])
        if extras and req is not None:
            req.mamba_pool_idx, req.mamba_cow_src_index = extras[1].device_indices, None
            self._begin_slot_load(ack_id, req)

    def _end_load(self, ack_id: int, node: TreeNode) -> None:
        self._release_host_state(hybrid(node))
        self._end_slot_load(ack_id)
        super()._end_load(ack_id, node)

    # --- storage ----------------------------------------------------------------------------------------------------

    def _archive_extras(self, node: TreeNode) -> list[PoolTransfer]:
        state = hybrid(node)
        if state.mamba_host_value is None or state.mamba_pending_id is not None:
            return []
        keys = page_keys(compute_node_hash_values(node, self.page_size)[-1:], node.key.extra_key)
        return [_trailing_state(state.mamba_host_value, keys)]

    def _hold_extras(self, operation: StorageOperation, node: TreeNode) -> None:
        if operation.extras:
            self._hold_host_state(hybrid(node))

    def _release_extras(self, operation: StorageOperation, node: TreeNode) -> None:
        if operation.extras:
            self._release_host_state(hybrid(node))

    def _prefetch_extras(self, anchor: TreeNode, num_units: int) -> list[PoolTransfer] | None:
        slot = self._states.alloc_host(1)
        return None if slot is None else [_trailing_state(slot, None)]

    def _take_extras(self, operation: PrefetchOperation, end: TreeNode) -> None:
        state = hybrid(end)
        is_wanted = state.host_value is not None and state.mamba_host_value is None
        if is_wanted and operation.extra_pool_hit_pages.get(PoolName.MAMBA):
            (fetched,) = operation.extras
            self._hold_host_state(state)
            state.mamba_host_value, fetched.host_indices = fetched.host_indices, None
            self._release_host_state(state)
            self._record_host_state(state)


def _trailing_state(slot: IndexArray, keys: list[str] | None) -> PoolTransfer:
    """The state at the end of a prefix: of a page that has one in the store, the last that is there."""
    return PoolTransfer(PoolName.MAMBA, host_indices=slot, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)
