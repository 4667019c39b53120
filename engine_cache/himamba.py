"""HiMambaRadixCache: the prefix cache of a model with recurrent layers, on device and host, with a store behind them.

    root ── A* ──┬── B ── C°'     *: a state on the device   °: one on the host   ': KV on the host only
                 └── D*°

KV moves as in `HiRadixCache`, and the state at a node's end moves along with it: one operation, all or nothing. On each
tier a state may go before its KV, which is no event. A match ends at the deepest state on either tier, so a node that
has none left is of use only on the way to others, and goes with the last of them.
"""

from __future__ import annotations

from typing import Unpack

from engine_cache.base import EvictResult, IncLockRefResult, MatchResult
from engine_cache.checks import check_host_states, check_host_tier, check_mamba_states, check_radix_cache
from engine_cache.errors import CacheStateError
from engine_cache.mamba import MambaOptions
from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.state_tier import StateTier
from engine_cache.storage.base import PoolName
from engine_cache.tiers.host_tier import live_prefix
from engine_cache.transfer import HybridCacheController
from engine_cache.tree.events import LAST_PAGE
from engine_cache.tree.node import MambaNode, TreeNode, hybrid
from engine_cache.types import IndexArray
from kv_events.errors import InvalidValueError
from kv_events.schema import StorageMedium
from kv_events.streams import MAMBA_GROUP


class HiMambaRadixCache(StateTier):
    """A radix tree over device and host pages, and the states at the ends of some of its nodes.

    controller: moves KV and, as its sidecar MAMBA, states; its device allocators must be `allocator` and
    `mamba_allocator`, and the cache makes itself what frees states for it. write_policy, load_back_threshold: as in
    `HiRadixCache`; a load that brings a state is never too small. The rest is as in `MambaRadixCache`. The cache must
    be reset after a TransferError.
    """

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator,
        mamba_allocator: MambaSlotAllocator,
        controller: HybridCacheController,
        write_policy: str = "write_through",
        load_back_threshold: int = 10,
        **options: Unpack[MambaOptions],
    ) -> None:
        self._init_host_tier(controller, allocator, page_size, write_policy, load_back_threshold)
        self._states = controller.entry(PoolName.MAMBA)
        if self._states.device_allocator is not mamba_allocator:
            raise InvalidValueError("mamba_allocator", mamba_allocator, "the controller's own for MAMBA")
        if self._states.host_pool.page_size != 1:
            raise InvalidValueError("page size of the host pool of states", self._states.host_pool.page_size, "1")
        self._states.host_evict_fn = self.evict_mamba_host
        self._states.device_evict_fn = self.evict_mamba
        super().__init__(page_size=page_size, allocator=allocator, mamba_allocator=mamba_allocator, **options)

    def check(self, request_indices: IndexArray | None = None, request_slots: IndexArray | None = None) -> None:
        """Recount every invariant of tree, tiers, states and pools; exact as in `HiRadixCache`. Raises CacheStateError
        with both figures of the first that fails."""
        check_radix_cache(self, request_indices)
        check_mamba_states(self, self._with_loading(request_slots))
        check_host_tier(self)
        check_host_states(self)

    # --- match and insert -------------------------------------------------------------------------------------------

    def _num_usable(self, path: list[TreeNode]) -> int:
        """Leading nodes of the path up to the deepest with a state on either tier."""
        nodes = [hybrid(node) for node in live_prefix(path)]
        return max((i for i, node in enumerate(nodes, 1) if _has_state(node)), default=0)

    def _match_result(self, used: list[TreeNode]) -> MatchResult:
        """As in `HiRadixCache`; `init_load_back` is worth a call exactly if one of the host lengths is not 0."""
        needs_state = bool(used) and hybrid(used[-1]).mamba_value is None
        return super()._match_result(used)._replace(mamba_host_hit_length=int(needs_state))

    def _branching_seqlen(self, path: list[TreeNode], num_used: int) -> int | None:
        """As in `MambaRadixCache`, of KV on the device only."""
        on_device = [node for node in path if node.value is not None]
        return super()._branching_seqlen(on_device, min(num_used, len(on_device)))

    def _merge_overlap(self, path: list[TreeNode], value: IndexArray, prev_prefix_len: int) -> int:
        """As in `MambaRadixCache`, and evicted nodes of the path take their rows over; those are not counted."""
        start = prefix_len = 0
        for node in path:
            end = start + len(node.key)
            if node.value is None:
                self._put_on_device(node, value[start:end])
            else:
                self._free(value[max(start, prev_prefix_len) : end])
                prefix_len += len(node.key)
            start = end
        return prefix_len

    def _touch(self, path: list[TreeNode]) -> None:
        super()._touch(path)
        for node in map(hybrid, path):
            if node in self.host_mamba_lru_list:
                self.host_mamba_lru_list.move_to_newest(node)

    def _split_node(self, child: TreeNode, split_len: int) -> TreeNode:
        """As in `MambaRadixCache`; the upper part has no hits yet."""
        upper = super()._split_node(child, split_len)
        upper.hit_count = 0
        return upper

    # --- eviction and locks -----------------------------------------------------------------------------------------

    def evict_full(self, num_tokens: int) -> EvictResult:
        """Evict leaves of the device, least recently used first, until `num_tokens` units of KV are free or none is
        left that may go."""
        states = self._mamba_evictable_size
        return EvictResult(self._evict_leaves(num_tokens), states - self._mamba_evictable_size)

    def _evict_state(self, node: MambaNode) -> None:
        if node in self.evictable_leaves and not node.children:
            self._evict_device_leaf(node)
        else:
            self._free_state(node)

    def _evict_device_leaf(self, leaf: TreeNode) -> None:
        """Evict a leaf with all it has on the device; it stays if a write-back finds no room on the host."""
        if leaf.host_value is None and self.write_policy != "write_back":
            self._evict_regular(leaf)
            return
        if leaf.host_value is None and self.write_backup(leaf, write_back=True):
            self.writing_check(write_back=True)
        if leaf.host_value is not None:
            self._evict_to_host(leaf)

    def _evict_backuped(self, node: TreeNode) -> None:
        self._evict_to_host(node)

    def _evict_to_host(self, node: TreeNode) -> None:
        """The node leaves the device and stays on the host, its state only if that is there, too."""
        super()._evict_backuped(node)
        state = hybrid(node)
        if state.mamba_value is not None:
            self._free_state(state)

    def _evict_regular(self, leaf: TreeNode) -> TreeNode:
        return self._delete_useless(super()._evict_regular(leaf))

    def evict_mamba_host(self, mamba_num: int) -> int:
        """Free `mamba_num` states on the host, least recently used first, and their number: of a node that is nowhere
        else and has no children all it has, of others the state alone, which is no event."""
        freed = 0
        node = self.host_mamba_lru_list.oldest()
        while node is not None and freed < mamba_num:
            following = self.host_mamba_lru_list.newer_than(node)  # stays: what goes along with a node has no state
            if node in self.evictable_host_leaves:
                self._evict_host_leaf(node)
            else:
                self._free_host_state(node)
            freed += 1
            node = following
        return freed

    def _free_host_state(self, node: MambaNode) -> None:
        assert node.mamba_host_value is not None
        self._states.host_pool.free(node.mamba_host_value)
        self.host_mamba_lru_list.remove(node)
        node.mamba_host_value = None
        self._record_group_remove(MAMBA_GROUP, node, StorageMedium.CPU, LAST_PAGE)

    def _evict_host_leaf(self, leaf: TreeNode) -> TreeNode:
        return self._delete_useless(self._delete_host_leaf(leaf))

    def _delete_host_leaf(self, leaf: TreeNode) -> TreeNode:
        state = hybrid(leaf)
        if state.mamba_host_value is not None:
            self._free_host_state(state)
        return super()._evict_host_leaf(leaf)

    def _delete_useless(self, node: TreeNode) -> TreeNode:
        """Delete the node if it is a leaf that no match can end at and nobody needs, and then those above it; the node
        that is left."""
        while self._is_useless(hybrid(node)):
            node = self._delete_tombstone_leaf(node)
        return node

    def _is_useless(self, node: MambaNode) -> bool:
        is_held = node.lock_ref > 0 or node.host_ref_counter > 0 or node.write_through_pending_id is not None
        return not (is_held or node.children or _has_state(node))

    def _delete_tombstone_leaf(self, node: TreeNode) -> TreeNode:
        """Delete a leaf without a state from all tiers; its parent."""
        if node.host_value is None:
            return self._delete_leaf(node)
        if node.value is not None:
            self._evict_to_host(node)
        return self._delete_host_leaf(node)

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Forbid eviction of the node's state, and of the KV of the node and everything above it. A node that is not on
        the device stands for the first one above it that is, which the result names."""
        return super().inc_lock_ref(_first_on_device(node))

    def _unlock_state(self, node: MambaNode) -> None:
        """As in `MambaRadixCache`, but a tombstone stays for the sake of its host copy."""
        if node.mamba_value is None:
            node.mamba_lock_ref -= 1
        else:
            super()._unlock_state(node)


def _has_state(node: MambaNode) -> bool:
    return node.mamba_value is not None or node.mamba_host_value is not None


def _first_on_device(node: TreeNode) -> TreeNode:
    step = node
    while step.value is None:
        if step.parent is None:
            raise CacheStateError(f"node {node.id} does not hang below a node on the device")
        step = step.parent
    return step
