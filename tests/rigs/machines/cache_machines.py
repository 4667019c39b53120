"""Machines for every cache class, every kind of model and every set of tiers."""

from typing import ClassVar

from engine_cache import EVICTION_POLICIES, WRITE_POLICIES
from engine_cache.storage.operations import STOP_POLICIES
from tests.rigs.machines.cache_machine import CacheMachine
from tests.rigs.machines.cache_tiers_machine import TieredCacheMachine

MODELS = {"Full": (), "Full+Mamba": ("mamba",), "Full+SWA": ("swa",), "Full+DSA": ("indexer",)}
"""Kinds of state besides KV of a unified cache."""

_DEVICE_OPTIONS = {
    "page_size": (1, 2, 3),
    "is_eagle": (False, True),
    "enable_kv_cache_events": (True, True, True, False),
}
_POLICIES = {"eviction_policy": tuple(EVICTION_POLICIES)}
_UNIFIED_OPTIONS = {**_DEVICE_OPTIONS, **_POLICIES, "window": (1, 3, 4, 8)}
_HOST_OPTIONS = {"write_policy": WRITE_POLICIES, "load_back_threshold": (1, 1, 4)}
_LAYOUTS = {"layout": ("page_first", "page_first_direct")}
_STORE_OPTIONS = {"stop": STOP_POLICIES, "emit": (True, True, False)}


class DeviceMachine(CacheMachine):
    OPTIONS: ClassVar = _UNIFIED_OPTIONS


class HostMachine(TieredCacheMachine):
    STORES = ()
    OPTIONS: ClassVar = {**_UNIFIED_OPTIONS, **_HOST_OPTIONS, **_LAYOUTS, "store": (None,)}


class MemoryMachine(TieredCacheMachine):
    """A machine with a store in memory, whose losses are noticed at once."""

    STORES = ("memory",)
    OPTIONS: ClassVar = {**HostMachine.OPTIONS, **_STORE_OPTIONS, "store": ("memory", "memory", None)}


class DirectoryMachine(TieredCacheMachine):
    """A machine with a store of files."""

    STORES = ("directory",)
    OPTIONS: ClassVar = {**HostMachine.OPTIONS, **_STORE_OPTIONS, "store": ("directory", "directory", None)}


class MooncakeMachine(TieredCacheMachine):
    """A machine with a Mooncake store. `machine_of` needs its master."""

    STORES: ClassVar[tuple[str, ...]] = ("mooncake",)
    OPTIONS: ClassVar = {**HostMachine.OPTIONS, **_STORE_OPTIONS, "store": ("mooncake", "mooncake", None)}
    master = None
    own_client = False

    def make_store(self, kind):
        from tests.rigs.machines.watched_mooncake import WatchedMooncake  # it needs the mooncake package

        return WatchedMooncake(self.rig.identity, self.master, own_client=self.own_client)


TIERS = {
    "device": DeviceMachine,
    "host": HostMachine,
    "host+memory": MemoryMachine,
    "host+directory": DirectoryMachine,
    "host+mooncake": MooncakeMachine,
}


def machine_of(kinds, tiers, **attributes):
    """Return the class of a machine of a unified cache. kinds: kinds of state besides KV. tiers: one of `TIERS`.
    attributes: further class attributes, such as the master of a Mooncake store."""
    name = "".join(word.title() for word in (*tiers.split("+"), *kinds))
    return type(f"{name}Machine", (TIERS[tiers],), {"KINDS": kinds, **attributes})


class ClassMachine(TieredCacheMachine):
    """A machine of a cache class for one kind of model, on real pools."""

    OPTIONS: ClassVar = {
        **_DEVICE_OPTIONS,
        **_STORE_OPTIONS,
        "write_policy": WRITE_POLICIES,
        "layout": ("layer_first", "page_first", "page_first_direct"),
        "pools": ("mha", "mla"),
        "store": ("memory", "memory", "directory", "directory", None),
    }


class HiRadixMachine(ClassMachine):
    CLASS = "hiradix"
    OPTIONS: ClassVar = ClassMachine.OPTIONS | _POLICIES


class NsaMachine(ClassMachine):
    """Sparse attention: KV is always accompanied by the index of the same tokens."""

    CLASS, KINDS = "hiradix", ("indexer",)


class HiMambaMachine(ClassMachine):
    CLASS = "himamba"


CLASS_MACHINES = (HiRadixMachine, HiMambaMachine, NsaMachine)
