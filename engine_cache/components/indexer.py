"""Pools that share the rows of Full KV, such as the index of sparse attention.

They have no data of their own at a node and take no part in matches and eviction. Their pages move together with KV.
"""

from __future__ import annotations

from engine_cache.pools.entry import HostPoolGroup
from engine_cache.storage.base import PoolName, PoolTransfer


def indexer_transfers(group: HostPoolGroup) -> list[PoolTransfer]:
    """Return the transfers that must accompany every transfer of KV. Empty for most models."""
    return [PoolTransfer(entry.name, indices_from_pool=PoolName.KV) for entry in group.sharing_entries()]
