"""Pools that live on the rows of Full KV, such as the index of sparse attention.

They hold nothing at a node of their own, so they need neither match nor eviction; their pages move with KV's.
"""

from __future__ import annotations

from engine_cache.pools.entry import HostPoolGroup
from engine_cache.storage.base import PoolName, PoolTransfer


def indexer_transfers(group: HostPoolGroup) -> list[PoolTransfer]:
    """What has to accompany every transfer of KV. Empty for most models."""
    return [PoolTransfer(entry.name, indices_from_pool=PoolName.KV) for entry in group.sharing_entries()]
