"""Recurrent states in a unified tree: one slot a node, valid exactly at the node's end, so a split leaves it below."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from engine_cache.base import InsertParams, MatchPrefixParams, MatchResult, Request
from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.state_requests import StatePool
from engine_cache.storage.base import PoolHitPolicy, PoolName, PoolTransfer
from engine_cache.storage_operations import PrefetchOperation
from engine_cache.tree.events import LAST_PAGE
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray
from engine_cache.unified.component import AuxiliaryComponent, LockTicket
from engine_cache.unified.match import MatchedPath, MatchValidator
from engine_cache.unified.node import ComponentType, UnifiedNode
from kv_events.errors import InvalidValueError
from kv_events.streams import MAMBA_GROUP

if TYPE_CHECKING:
    from engine_cache.unified.cache import UnifiedRadixCache

_TAKEN: LockTicket = 1


class MambaComponent(AuxiliaryComponent):
    """Recurrent states.

    allocator: owner of the slots. state_pool, chunk_size, enable_extra_buffer: as `MambaRadixCache` says of its own.
    Raises InvalidValueError for a tree whose pages or keys need the extra buffer.
    """

    kind: ClassVar[ComponentType] = ComponentType.MAMBA
    pool: ClassVar[PoolName] = PoolName.MAMBA
    eviction_priority: ClassVar[int] = 0
    pages_told: ClassVar[slice] = LAST_PAGE
    event_group = MAMBA_GROUP

    def __init__(
        self,
        allocator: MambaSlotAllocator,
        *,
        state_pool: StatePool | None = None,
        chunk_size: int = 64,
        enable_extra_buffer: bool = False,
    ) -> None:
        if chunk_size < 1:
            raise InvalidValueError("chunk_size", chunk_size, "a positive integer")
        self.allocator = allocator
        self.state_pool = state_pool
        self.chunk_size = chunk_size
        self.enable_extra_buffer = enable_extra_buffer

    def attach(self, tree: UnifiedRadixCache) -> None:
        if not self.enable_extra_buffer and tree.page_size != 1:
            raise InvalidValueError("page_size", tree.page_size, "1 without enable_extra_buffer")
        if not self.enable_extra_buffer and tree.is_eagle:
            raise InvalidValueError("is_eagle", True, "False without enable_extra_buffer")
        super().attach(tree)

    @property
    def device_allocator(self) -> PagedTokenToKVPoolAllocator:
        return self.allocator

    # --- match ------------------------------------------------------------------------------------------------------

    def create_match_validator(self, match_device_only: bool = False) -> MatchValidator:
        def accepts(node: UnifiedNode) -> bool:
            data = self.data(node)
            return data.value is not None or (data.host_value is not None and not match_device_only)

        return accepts

    def finalize_match_result(self, result: MatchResult, path: MatchedPath, params: MatchPrefixParams) -> MatchResult:
        """Where a state would be of use is told only by a tree without a host tier."""
        best, branching = self.data(result.best_match_node), None
        if self.tree.cache_controller is None and len(path.nodes) > path.num_device:
            branching = path.num_units() // self.chunk_size * self.chunk_size or None
        if params.cow_mamba:
            if params.req is None:
                raise InvalidValueError("req", None, "the request that takes the state, with cow_mamba")
            needed = (result.best_match_node, result.last_device_node)
            self.tree.copy_on_write(params.req, best.value, needed)
        is_on_host_only = best.value is None and best.host_value is not None
        return result._replace(mamba_branching_seqlen=branching, mamba_host_hit_length=int(is_on_host_only))

    # --- where data are ---------------------------------------------------------------------------------------------

    def _free_device_rows(self, node: UnifiedNode, rows: IndexArray) -> None:
        self.allocator.free(rows)

    def redistribute_on_split(self, upper: UnifiedNode, lower: UnifiedNode, split_len: int) -> None:
        """The state is that of the lower part's end."""

    # --- locks ------------------------------------------------------------------------------------------------------

    def acquire(self, node: UnifiedNode) -> LockTicket | None:
        if self.data(node).value is None:
            return None
        self.lock(node)
        return _TAKEN

    def release(self, node: UnifiedNode, ticket: LockTicket) -> None:
        self.unlock(node)

    def acquire_host(self, node: UnifiedNode) -> LockTicket | None:
        if self.data(node).host_value is None:
            return None
        self.lock_host(node)
        return _TAKEN

    def release_host(self, node: UnifiedNode, ticket: LockTicket) -> None:
        self.unlock_host(node)

    # --- insert -----------------------------------------------------------------------------------------------------

    def check_insert(self, params: InsertParams) -> None:
        if params.mamba_value is None or len(params.mamba_value) != 1:
            raise InvalidValueError("mamba_value", params.mamba_value, "one slot")

    def finish_insert(self, end: UnifiedNode, params: InsertParams) -> bool:
        if self.data(end).value is not None:
            return False
        assert params.mamba_value is not None
        self.put_on_device(end, params.mamba_value.astype(np.int64))
        return True

    # --- transfers --------------------------------------------------------------------------------------------------

    def needed_nodes(self, node: UnifiedNode) -> list[UnifiedNode]:
        return [node]

    def load_transfers(self, node: UnifiedNode, req: Request | None) -> list[PoolTransfer]:
        """The state goes to a slot of the tree's and, with a request, to one of its own."""
        data = self.data(node)
        if data.value is not None or data.host_value is None:
            return []
        transfers = [PoolTransfer(self.pool, host_indices=data.host_value, nodes_to_load=[node])]
        if req is not None:
            transfers.append(PoolTransfer(self.pool, host_indices=data.host_value, device_indices=req.mamba_pool_idx))
        return transfers

    def commit_load(self, node: UnifiedNode, transfers: list[PoolTransfer], req: Request | None) -> None:
        if not transfers:
            return
        slots = [transfer.device_indices for transfer in transfers]
        assert slots[0] is not None
        self.put_on_device(node, slots[0])
        if req is not None:
            req.mamba_pool_idx, req.mamba_cow_src_index = slots[1], None

    def prepare_load(self, node: UnifiedNode, req: Request) -> None:
        """What need not be loaded is copied, from where it is by now."""
        self.tree.copy_on_write(req, self.data(node).value, [node])

    def refuse_load(self, anchor: TreeNode, req: Request) -> None:
        self.tree.copy_on_write(req, self.data(anchor).value, [anchor])

    def archive_transfer(self, node: UnifiedNode, keys: list[str]) -> PoolTransfer:
        return _trailing_state(self.data(node).host_value, keys[-1:])

    def prefetch_transfer(self, anchor: UnifiedNode, num_pages: int) -> PoolTransfer | None:
        return _trailing_state(None, [""])

    def commit_prefetch(self, end: UnifiedNode, fetched: PoolTransfer, operation: PrefetchOperation) -> None:
        is_wanted = end.host_value is not None and self.data(end).host_value is None
        if is_wanted and operation.extra_pool_hit_pages.get(self.pool):
            assert fetched.host_indices is not None
            self.put_on_host(end, fetched.host_indices)
            self.tell_of_host(end)
            fetched.host_indices = None


def _trailing_state(slot: IndexArray | None, keys: list[str] | None) -> PoolTransfer:
    return PoolTransfer(PoolName.MAMBA, host_indices=slot, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)
