"""Machines for every kind of model that a UnifiedRadixCache supports, on every set of tiers."""

from __future__ import annotations

from typing import ClassVar

from engine_cache import EVICTION_POLICIES, WRITE_POLICIES
from engine_cache.storage.operations import STOP_POLICIES
from tests.support.caches.unified_machine import UnifiedDeviceMachine
from tests.support.caches.unified_tiered_machine import UnifiedCacheMachine

MODELS = {"Full": (), "Full+Mamba": ("mamba",), "Full+SWA": ("swa",), "Full+DSA": ("indexer",)}
"""Kinds of state besides full KV."""

DEVICE_OPTIONS = {
    "page_size": (1, 2, 3),
    "window": (1, 3, 4, 8),
    "is_eagle": (False, True),
    "eviction_policy": tuple(EVICTION_POLICIES),
    "enable_kv_cache_events": (True, True, True, False),
}
HOST_OPTIONS = {
    **DEVICE_OPTIONS,
    "write_policy": WRITE_POLICIES,
    "load_back_threshold": (1, 1, 4),
    "layout": ("page_first", "page_first_direct"),
}
STORE_OPTIONS = {"stop": STOP_POLICIES, "emit": (True, True, False)}


class DeviceMachine(UnifiedDeviceMachine):
    OPTIONS: ClassVar = DEVICE_OPTIONS  # type: ignore[assignment]


class HostMachine(UnifiedCacheMachine):
    STORES = ()
    OPTIONS: ClassVar = {**HOST_OPTIONS, "store": (None,)}


class MemoryMachine(UnifiedCacheMachine):
    """A machine with a store in memory, whose losses are noticed at once."""

    STORES = ("memory",)
    OPTIONS: ClassVar = {**HOST_OPTIONS, **STORE_OPTIONS, "store": ("memory", "memory", None)}


class DirectoryMachine(UnifiedCacheMachine):
    """A machine with a store of files."""

    STORES = ("directory",)
    OPTIONS: ClassVar = {**HOST_OPTIONS, **STORE_OPTIONS, "store": ("directory", "directory", None)}


class MooncakeMachine(UnifiedCacheMachine):
    """A machine with a Mooncake store. `machine_of` needs its master."""

    STORES: ClassVar[tuple[str, ...]] = ("mooncake",)
    OPTIONS: ClassVar = {**HOST_OPTIONS, **STORE_OPTIONS, "store": ("mooncake", "mooncake", None)}
    master = None
    own_client = False

    def make_store(self, kind):
        from tests.support.caches.watched_mooncake import WatchedMooncake  # it needs the mooncake package

        return WatchedMooncake(self.rig.identity, self.master, own_client=self.own_client)


TIERS = {
    "device": DeviceMachine,
    "host": HostMachine,
    "host+memory": MemoryMachine,
    "host+directory": DirectoryMachine,
    "host+mooncake": MooncakeMachine,
}


def machine_of(kinds, tiers, **attributes):
    """Return the class of a machine. kinds: kinds of state besides full KV. tiers: one of `TIERS`. attributes: further
    class attributes, such as the master of a Mooncake store."""
    name = "".join(word.title() for word in (*tiers.split("+"), *kinds))
    return type(f"{name}Machine", (TIERS[tiers],), {"KINDS": kinds, **attributes})
