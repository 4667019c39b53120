"""Requirements on the components of a unified tree, and the construction of a tree."""

from typing import ClassVar

import numpy as np
import pytest

from engine_cache import (
    CacheStateError,
    ComponentType,
    HostPoolGroup,
    HybridCacheController,
    InsertParams,
    KVCacheEventMixin,
    Lane,
    MambaComponent,
    MambaSlotAllocator,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixKey,
    StoragePolicy,
    SWAComponent,
    SWATokenToKVPoolAllocator,
    TreeComponent,
    UnifiedRadixCache,
)
from engine_cache.storage.base import PoolName
from kv_events.errors import InvalidValueError
from tests.support.caches.checks import check_cache
from tests.support.caches.number_pools import DeviceRows, HostPool
from tests.support.caches.tier_rig import MemoryStorage
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch


def test_a_component_whose_validator_does_not_know_the_device_alone_fails_as_a_class():
    with pytest.raises(TypeError, match=r"Lacking.create_match_validator must take match_device_only"):

        class Lacking(TreeComponent):
            kind: ClassVar = ComponentType.MAMBA

            def create_match_validator(self):  # type: ignore[override]
                return lambda node: True


def test_a_component_without_a_validator_cannot_be_made():
    class Abstract(TreeComponent):
        kind: ClassVar = ComponentType.MAMBA

    with pytest.raises(TypeError, match="create_match_validator"):
        Abstract()  # type: ignore[abstract]


@pytest.mark.parametrize("kinds", [(), ("mamba",), ("swa",), ("swa", "mamba")])
def test_every_component_answers_for_any_tier_and_for_the_device_alone(kinds):
    rig = UnifiedRig(kinds)
    rig.insert([1, 1, 2, 2])
    rig.settle()
    rig.cache.host.evict_leaf(rig.node_of([1, 1, 2, 2]))
    node = rig.node_of([1, 1, 2, 2])
    for component in rig.cache.components:
        assert component.create_match_validator()(node)
        assert not component.create_match_validator(match_device_only=True)(node)


def test_events_come_from_the_one_mixin():
    assert UnifiedRadixCache.take_events is KVCacheEventMixin.take_events


def test_full_data_of_a_node_is_a_view_of_what_every_node_has():
    rig = UnifiedRig(("mamba",))
    rig.insert([1, 1])
    node = rig.node_of([1, 1])
    full, swa, mamba = node.component_data
    assert (full.value is node.value, full.host_value is node.host_value) == (True, True)
    assert (full.lock_ref, full.host_lock_ref) == (node.lock_ref, node.host_ref_counter)
    assert swa.value is None
    assert mamba is node.auxiliary(ComponentType.MAMBA)


def test_components_are_found_by_kind():
    rig = UnifiedRig(("swa", "mamba"))
    assert rig.cache.component(ComponentType.MAMBA) is rig.cache.auxiliaries[1]
    with pytest.raises(InvalidValueError, match="SWA"):
        UnifiedRig().cache.component(ComponentType.SWA)


def make(components, allocator=None, page_size=2, **options):
    allocator = allocator or PagedTokenToKVPoolAllocator(8 * page_size, page_size)
    return UnifiedRadixCache(page_size=page_size, allocator=allocator, components=components, **options)


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: make([states(), states()]), "components"),
        (lambda: make([], SWATokenToKVPoolAllocator(16, 16, 2)), "allocator"),
        (lambda: make([SWAComponent(SWATokenToKVPoolAllocator(16, 16, 2), 3)]), "allocator"),
        (lambda: SWAComponent(SWATokenToKVPoolAllocator(16, 16, 2), 0), "sliding_window_size"),
        (lambda: MambaComponent(MambaSlotAllocator(3), mamba_cache_chunk_size=0), "chunk_size"),
        (lambda: make([MambaComponent(MambaSlotAllocator(3))]), "page_size"),
        (lambda: make([MambaComponent(MambaSlotAllocator(3))], page_size=1, is_eagle=True), "is_eagle"),
    ],
)
def test_what_does_not_fit_together_is_refused(build, error):
    with pytest.raises(InvalidValueError, match=error):
        build()


def states():
    return MambaComponent(MambaSlotAllocator(3), enable_mamba_extra_buffer=True)


def controller(allocator, *sidecars):
    kv = PoolEntry(PoolName.KV, HostPool(20, 2), DeviceRows(18), allocator)
    return HybridCacheController(HostPoolGroup.of(kv, *sidecars), ManualCopyEngine(), transfer_layer_num=1)


def test_a_host_tier_must_know_every_kind_by_its_own_allocator():
    pages, component = PagedTokenToKVPoolAllocator(16, 2), states()
    cache = make([component], pages)
    with pytest.raises(InvalidValueError, match="mamba"):
        cache.init_hicache(controller(pages))
    foreign = PoolEntry(PoolName.MAMBA, HostPool(5, 1), None, MambaSlotAllocator(3))
    with pytest.raises(InvalidValueError, match="mamba_allocator"):
        cache.init_hicache(controller(pages, foreign))
    assert cache.cache_controller is None
    own = PoolEntry(PoolName.MAMBA, HostPool(5, 1), None, component.allocator)
    attached = controller(pages, own)
    cache.init_hicache(attached)
    assert cache.cache_controller is attached
    with pytest.raises(InvalidValueError, match="controller"):
        cache.init_hicache(attached)


def test_a_host_tier_comes_before_anything_is_cached():
    rig = UnifiedRig(tiers=1)
    rig.insert([1, 1])
    with pytest.raises(InvalidValueError, match="before anything is cached"):
        rig.cache.init_hicache(controller(rig.pool))


def test_pools_that_live_on_the_rows_of_kv_ride_along_with_every_transfer():
    pages = PagedTokenToKVPoolAllocator(16, 2)
    cache = make([], pages)
    indexer = PoolEntry(PoolName.INDEXER, HostPool(20, 2), DeviceRows(18), pages, share_indices_with_anchor=True)
    attached = controller(pages, indexer)
    cache.init_hicache(attached)
    store = MemoryStorage()
    assert cache.attach_storage_backend(store, StoragePolicy(prefetch_threshold=1))[0]
    cache.insert(InsertParams(RadixKey([1, 1]), pages.alloc(2)))
    attached.engine.step(Lane.WRITE)
    cache.writing_check()
    attached.engine.drain()
    assert {name for name, _ in store.pages} == {PoolName.KV, PoolName.INDEXER}
    del store.pages[PoolName.INDEXER, next(key for _, key in store.pages)]
    cache.reset()
    cache.prefetch_from_storage("r", cache.root_node, [1, 1])
    attached.engine.drain()
    cache.check_hicache_events()
    assert cache.check_prefetch_progress("r")
    assert cache.pop_prefetch_loaded_tokens("r") == 0


def test_sanity_check_finds_what_is_wrong():
    rig = UnifiedRig(("mamba",))
    rig.insert([1, 1])
    rig.settle()
    rig.cache.sanity_check()
    rig.data(rig.node_of([1, 1]), "mamba").value = np.array([3])
    with pytest.raises(CacheStateError, match="distinct pages of free"):
        check_cache(rig.cache)
    rig.cache.states.evictable_size = 2
    with pytest.raises(CacheStateError, match=r"evictable mamba rows.*2 != 1"):
        rig.cache.sanity_check()
