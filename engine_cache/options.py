"""Keyword arguments that the caches share: classes above `RadixCache` pass them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from engine_cache.pools.req_to_token import ReqToTokenPool


class CacheOptions(TypedDict, total=False):
    """What any cache may be given. `RadixCache` says what each means, and what holds without it."""

    req_to_token_pool: ReqToTokenPool | None
    enable_kv_cache_events: bool
    emit_group_events: bool
    is_eagle: bool
    disable: bool
    seed_of_extra_key: Callable[[str], int]


class RadixOptions(CacheOptions, total=False):
    """The same for caches whose order of eviction can be chosen."""

    eviction_policy: str
