"""The host tier of a radix cache, whole: how it is set up and reset, and what a match finds on it.

    on device only ── write_backup ──> pending ── writing_check ──> on both ── _evict_backuped ──> on host only
                                                                    on both <─────── load_back ──────────┘

The arrows are in the modules beside this one, each built on the one before: `host_leaves`, `backup`, `device_eviction`,
`load_back`.
"""

from __future__ import annotations

from itertools import count, takewhile

import numpy as np

from engine_cache.base import MatchResult
from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.tiers.backup import WRITE_POLICIES
from engine_cache.tiers.load_back import LoadBacks
from engine_cache.transfer import HiCacheController
from engine_cache.tree.key import RadixKey
from engine_cache.tree.node import TreeNode
from engine_cache.types import IndexArray, no_indices
from kv_events.errors import InvalidValueError


class HostTier(LoadBacks):
    """What caches with a host tier share. A concrete class calls `_init_host_tier` before the constructor above it."""

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
        self._ack_ids = count()

    def reset(self) -> None:
        self._end_transfers()
        super().reset()

    def _end_transfers(self) -> None:
        """Let what runs end, and forget what has been begun."""
        self.controller.reset()

    def _require_loads(self) -> None:
        """Raises TransferError after a load that failed: what should be on the device may be anything."""
        self.controller.require_loads()

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


def live_prefix(path: list[TreeNode]) -> list[TreeNode]:
    """Leading nodes that are on a tier: a match must not walk through others."""
    return list(takewhile(lambda node: node.value is not None or node.host_value is not None, path))
