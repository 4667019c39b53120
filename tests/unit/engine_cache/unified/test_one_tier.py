"""A unified tree without a host tier accepts the calls that a scheduler makes to a tree with a host tier."""

import pytest

from kv_events.errors import InvalidValueError
from tests.support.caches.tier_rig import MemoryStorage
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

CALLS = {
    "check_hicache_events": ((), None),
    "writing_check": ((True,), None),
    "flush_write_through_acks": ((), None),
    "loading_check": ((), None),
    "ready_to_load_host_cache": ((), -1),
    "evict_host": ((4,), 0),
    "clear_storage_backend": ((), None),
    "detach_storage_backend": ((), (True, "no store is attached")),
    "attach_storage_backend": ((MemoryStorage(),), (False, "the cache has no host tier")),
    "check_prefetch_progress": (("r",), True),
    "pop_prefetch_loaded_tokens": (("r",), 0),
    "release_aborted_request": (("r",), None),
}
OF_A_NODE = {"write_backup": 0, "load_back": None}


@pytest.fixture
def rig():
    rig = UnifiedRig(("mamba", "swa"), tiers=1)
    rig.insert([1, 1, 2, 2])
    rig.cache.take_events()
    return rig


@pytest.mark.parametrize("call", CALLS)
def test_there_is_nothing_to_do(rig, call):
    arguments, answer = CALLS[call]
    assert getattr(rig.cache, call)(*arguments) == answer
    assert rig.cache.take_events() == []
    rig.check()


@pytest.mark.parametrize("call", OF_A_NODE)
def test_nothing_of_a_node_is_moved(rig, call):
    assert getattr(rig.cache, call)(rig.node_of([1, 1, 2, 2])) == OF_A_NODE[call]
    assert rig.cache.take_events() == []
    rig.check()


def test_nothing_is_prefetched(rig):
    rig.cache.prefetch_from_storage("r", rig.cache.root_node, [1] * 8)
    assert rig.cache.ongoing_prefetch == {}


def test_a_caller_that_requires_a_store_gets_the_reason(rig):
    with pytest.raises(InvalidValueError, match="store: got 'MemoryStorage', expected a cache with a host tier"):
        rig.cache.attach_store(MemoryStorage())
