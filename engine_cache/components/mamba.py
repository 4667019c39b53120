"""Recurrent states: one slot per node, valid exactly at the end of the node.

A split leaves the state at the lower node.
"""

from typing import ClassVar, Protocol

import numpy as np

from engine_cache.base import InsertParams, MatchResult, Request
from engine_cache.components.component import AuxiliaryComponent, MatchedPath, MatchValidator
from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.storage.base import PoolHitPolicy, PoolName, PoolTransfer
from engine_cache.storage.operations import PrefetchOperation
from engine_cache.tree.events import LAST_PAGE, EventRecorder
from engine_cache.tree.node import ComponentType, TreeNode
from engine_cache.tree.tree import RadixTree
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError, check_positive
from kv_events.streams import MAMBA_GROUP


class StatePool(Protocol):
    """Memory of the recurrent states."""

    def copy_from(self, src: IndexArray, dst: IndexArray) -> None:
        """Copy the states of the slots `src` to the slots `dst`, in all layers."""


class MambaComponent(AuxiliaryComponent):
    """Recurrent states.

    allocator: owner of the slots. mamba_pool: the states, which are copied when a running request shares its state;
    with None only slots are assigned and nothing is copied. enable_mamba_extra_buffer: requests track a state at a page
    boundary in addition to the running one; required for page sizes above 1 and bigram keys. mamba_cache_chunk_size:
    tokens between the points at which an engine can save a state.
    """

    kind: ClassVar[ComponentType] = ComponentType.MAMBA
    pool: ClassVar[PoolName] = PoolName.MAMBA
    eviction_priority: ClassVar[int] = 0
    event_pages: ClassVar[slice] = LAST_PAGE
    event_group = MAMBA_GROUP

    def __init__(
        self,
        allocator: MambaSlotAllocator,
        mamba_pool: StatePool | None = None,
        enable_mamba_extra_buffer: bool = False,
        mamba_cache_chunk_size: int = 64,
    ) -> None:
        check_positive(mamba_cache_chunk_size=mamba_cache_chunk_size)
        self.allocator = allocator
        self.mamba_pool = mamba_pool
        self.chunk_size = mamba_cache_chunk_size
        self.has_extra_buffer = enable_mamba_extra_buffer

    def attach(self, tree: RadixTree, events: EventRecorder) -> None:
        if not self.has_extra_buffer and tree.page_size != 1:
            raise InvalidValueError("page_size", tree.page_size, "1 without enable_mamba_extra_buffer")
        if not self.has_extra_buffer and tree.is_eagle:
            raise InvalidValueError("is_eagle", True, "False without enable_mamba_extra_buffer")
        super().attach(tree, events)

    def clear(self) -> None:
        super().clear()
        self._loads: dict[int, int | None] = {}  # load of a state -> slot of a request that it writes to as well
        self._released: set[int] = set()  # slots that their requests have released and loads still write to

    @property
    def device_allocator(self) -> PagedTokenToKVPoolAllocator:
        return self.allocator

    def create_match_validator(self, match_device_only: bool = False) -> MatchValidator:
        def accepts(node: TreeNode) -> bool:
            data = self.data(node)
            return data.value is not None or (data.host_value is not None and not match_device_only)

        return accepts

    def finalize_match_result(self, result: MatchResult, path: MatchedPath) -> MatchResult:
        if not path.num_best:
            return result
        best = self.data(path.nodes[path.num_best - 1])
        return result._replace(mamba_host_hit_length=int(best.value is None and best.host_value is not None))

    def branching_seqlen(self, cached: int, usable: int) -> int | None:
        """Return the length at which a state would be useful: the last chunk boundary within `cached` units of KV.

        usable: units that can be matched now. Returns None if all cached units can be matched or there is no such
        boundary.
        """
        return None if cached <= usable else cached // self.chunk_size * self.chunk_size or None

    def _free_device_rows(self, node: TreeNode, rows: IndexArray) -> None:
        self.allocator.free(rows)

    def was_split(self, upper: TreeNode, lower: TreeNode, split_len: int) -> None:
        """Do nothing: the state stays at the lower node."""

    def check_insert(self, params: InsertParams) -> None:
        if params.mamba_value is None or len(params.mamba_value) != 1:
            raise InvalidValueError("mamba_value", params.mamba_value, "one slot")

    def finish_insert(self, end: TreeNode, params: InsertParams) -> bool:
        if self.data(end).value is not None:
            return False
        assert params.mamba_value is not None
        self.put_on_device(end, params.mamba_value.astype(np.int64))
        return True

    def nodes_to_lock(self, node: TreeNode, on_host: bool) -> list[TreeNode]:
        data = self.data(node)
        return [] if (data.host_value if on_host else data.value) is None else [node]

    def needed_nodes(self, node: TreeNode) -> list[TreeNode]:
        return [node]

    def load_transfers(self, node: TreeNode, req: Request | None) -> list[PoolTransfer]:
        """Load the state to a slot of the tree and, with a request, also to a slot of the request."""
        data = self.data(node)
        if data.value is not None or data.host_value is None:
            return []
        transfers = [PoolTransfer(self.pool, host_indices=data.host_value, nodes_to_load=[node])]
        if req is not None:
            transfers.append(PoolTransfer(self.pool, host_indices=data.host_value, device_indices=req.mamba_pool_idx))
        return transfers

    def commit_load(self, ack_id: int, node: TreeNode, transfers: list[PoolTransfer], req: Request | None) -> None:
        if not transfers:
            return
        slots = [transfer.device_indices for transfer in transfers]
        assert slots[0] is not None
        self.put_on_device(node, slots[0])
        self.lock_host(node)  # until `end_load`
        self._loads[ack_id] = None
        if req is not None:
            assert slots[1] is not None
            req.mamba_pool_idx, req.mamba_cow_src_index = slots[1], None
            self._loads[ack_id] = int(slots[1][0])

    def end_load(self, ack_id: int, node: TreeNode) -> None:
        if ack_id not in self._loads:
            return
        slot = self._loads.pop(ack_id)
        self.unlock_host(node)
        if slot in self._released and slot not in self._loads.values():
            self._released.remove(slot)
            self.allocator.free(np.array([slot], np.int64))

    def release_slot(self, slot: IndexArray) -> None:
        """Free the slot of a request, [1].

        A slot that a load still writes to is freed when the load has ended, because the load would overwrite the state
        of the next owner.
        """
        if int(slot[0]) in self._loads.values():
            self._released.add(int(slot[0]))
        else:
            self.allocator.free(slot)

    def released_slots(self) -> IndexArray:
        """Return the slots that were released by their requests and are still in use by loads."""
        return np.array(sorted(self._released), np.int64)

    def archive_transfer(self, node: TreeNode, keys: list[str]) -> PoolTransfer:
        return _trailing_state(self.data(node).host_value, keys[-1:])

    def prefetch_transfer(self, start_node: TreeNode, num_pages: int) -> PoolTransfer | None:
        return _trailing_state(None, [""])

    def commit_prefetch(self, end: TreeNode, fetched: PoolTransfer, operation: PrefetchOperation) -> None:
        is_wanted = end.host_value is not None and self.data(end).host_value is None
        if is_wanted and operation.extra_pool_hit_pages.get(self.pool):
            assert fetched.host_indices is not None
            self.put_on_host(end, fetched.host_indices)
            self.record_on_host(end)
            fetched.host_indices = None


class NodeStates(MambaComponent):
    """States of a cache whose locks are released by node alone, without tickets.

    Tombstones have lock counts as well, so that a lock and its release change the same counts even if a state arrived
    in between. All states on the host share one order of use, whether or not they are on the device too.
    """

    lists_host_copies = True

    def nodes_to_lock(self, node: TreeNode, on_host: bool) -> list[TreeNode]:
        return [node]

    def commit_load(self, ack_id: int, node: TreeNode, transfers: list[PoolTransfer], req: Request | None) -> None:
        super().commit_load(ack_id, node, transfers, req)
        if transfers:
            self.tree.touch([node])


def _trailing_state(slot: IndexArray | None, keys: list[str]) -> PoolTransfer:
    """Return the transfer of the state at the end of a prefix: in a storage backend, that of the last page."""
    return PoolTransfer(PoolName.MAMBA, host_indices=slot, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)
