"""What the environment says about the engine side."""

from __future__ import annotations

import os

from kv_events.errors import InvalidValueError

DEBUG_POOLS = "KVSIGHT_DEBUG_POOLS"
HOST_MEMORY_RESERVE = "KVSIGHT_HOST_MEMORY_RESERVE_BYTES"
HICACHE_HOST_MEMORY_RESERVE_BYTES = 10 * 1024**3


def debug_pools() -> bool:
    """Whether allocators look for double frees and foreign indices: `KVSIGHT_DEBUG_POOLS`, 0 (default) or 1."""
    value = os.environ.get(DEBUG_POOLS, "0")
    if value not in ("0", "1"):
        raise InvalidValueError(DEBUG_POOLS, value, "0 or 1")
    return value == "1"


def host_memory_reserve_bytes() -> int:
    """Memory that host pools leave to everybody else: `KVSIGHT_HOST_MEMORY_RESERVE_BYTES`, 10 GiB by default."""
    value = os.environ.get(HOST_MEMORY_RESERVE, str(HICACHE_HOST_MEMORY_RESERVE_BYTES))
    if not value.isdecimal():
        raise InvalidValueError(HOST_MEMORY_RESERVE, value, "a number of bytes")
    return int(value)
