"""Limits on the memory of host pools, checked for all pools of a stack together. No torch."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from engine_cache.settings import host_memory_reserve_bytes
from kv_events.errors import InvalidValueError


def require_host_memory(requested: Mapping[str, int], reserve_bytes: int | None = None) -> None:
    """Refuse pools that would leave less free memory than the reserve.

    requested: bytes by pool name, for all pools of a stack. reserve_bytes: None for the setting. Raises
    InvalidValueError with all figures in GB.
    """
    reserve = host_memory_reserve_bytes() if reserve_bytes is None else reserve_bytes
    available = psutil.virtual_memory().available - reserve
    total = sum(requested.values())
    if total > available:
        names = ", ".join(requested)
        raise InvalidValueError(
            f"memory of host pool {names}",
            f"{total / 1e9:.2f} GB",
            f"at most {available / 1e9:.2f} GB, which is what is available less a reserve of {reserve / 1e9:.2f} GB; "
            "reduce the size of the host cache",
        )
