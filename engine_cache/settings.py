"""What the environment says about the engine side."""

from __future__ import annotations

import os

from kv_events.errors import InvalidValueError

DEBUG_POOLS = "KVSIGHT_DEBUG_POOLS"


def debug_pools() -> bool:
    """Whether allocators look for double frees and foreign indices: `KVSIGHT_DEBUG_POOLS`, 0 (default) or 1."""
    value = os.environ.get(DEBUG_POOLS, "0")
    if value not in ("0", "1"):
        raise InvalidValueError(DEBUG_POOLS, value, "0 or 1")
    return value == "1"
