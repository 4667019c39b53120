"""What a cache refuses: configurations that do not fit together, calls for tiers it lacks, and damage of its data."""

from typing import Any, ClassVar

import numpy as np
import pytest

from engine_cache import (
    WRITE_POLICIES,
    BytelessHostPool,
    CacheStateError,
    ComponentType,
    HiCacheController,
    HiMambaRadixCache,
    HiRadixCache,
    HostPoolGroup,
    HybridCacheController,
    InsertParams,
    MambaComponent,
    MambaRadixCache,
    MambaSlotAllocator,
    ManualCopyEngine,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixCache,
    RadixKey,
    SWAComponent,
    SWATokenToKVPoolAllocator,
    TreeComponent,
    UnifiedRadixCache,
)
from engine_cache.storage.base import PoolName
from kv_events.errors import InvalidValueError
from tests.models.cache_checks import check_cache
from tests.rigs.cache import AB, A, CacheRig, rigs
from tests.rigs.cache_stores import MemoryStorage

# --- configurations ---


def pages(page_size=2):
    return PagedTokenToKVPoolAllocator(8, page_size)


def slots():
    return MambaSlotAllocator(3)


def entry(name, allocator, page_size=1):
    return PoolEntry(name, BytelessHostPool(12, page_size), None, allocator)


def controller(allocator, *sidecars, page_size=2):
    kv = entry(PoolName.KV, allocator, page_size)
    return HybridCacheController(HostPoolGroup.of(kv, *sidecars), ManualCopyEngine())


def hiradix(host_page_size=2, **options):
    pool = pages()
    kv = HiCacheController(entry(PoolName.KV, pool, host_page_size), ManualCopyEngine())
    return HiRadixCache(**{"page_size": 2, "allocator": pool, "controller": kv} | options)


def himamba(sidecar=PoolName.MAMBA, state_page=1, **options):
    pool, states = pages(), slots()
    sidecars = [entry(sidecar, states, state_page)] if sidecar else []
    defaults: dict[str, Any] = {"page_size": 2, "allocator": pool, "mamba_allocator": states}
    defaults |= {"enable_mamba_extra_buffer": True, "controller": controller(pool, *sidecars)}
    return HiMambaRadixCache(**defaults | options)


def mamba(page_size=2, **options):
    return MambaRadixCache(page_size=page_size, mamba_allocator=slots(), **options)


def unified(*components, allocator=None, page_size=2, **options):
    allocator = allocator or PagedTokenToKVPoolAllocator(8 * page_size, page_size)
    return UnifiedRadixCache(page_size=page_size, allocator=allocator, components=components, **options)


def states(**options):
    return MambaComponent(slots(), **{"enable_mamba_extra_buffer": True} | options)


def windows(size=3):
    return SWAComponent(SWATokenToKVPoolAllocator(16, 16, 2), size)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: RadixCache(page_size=2, allocator=pages(4)), r"page_size: got 2.*4"),
        (lambda: hiradix(page_size=0), "page_size: got 0"),
        (lambda: hiradix(host_page_size=4), "page_size: got 2, expected the host pool's, 4"),
        (lambda: hiradix(write_policy="write_around"), f"write_around.*{', '.join(WRITE_POLICIES)}"),
        (lambda: hiradix(load_back_threshold=-1), "load_back_threshold: got -1"),
        (lambda: hiradix(eviction_policy="random"), "random"),
        (lambda: hiradix(allocator=pages()), "the controller's own"),
        (lambda: himamba(page_size=0), "page_size.*0"),
        (lambda: himamba(write_policy="later"), "write_policy.*later"),
        (lambda: himamba(load_back_threshold=-1), "load_back_threshold.*-1"),
        (lambda: himamba(mamba_allocator=slots()), "mamba_allocator"),
        (lambda: himamba(sidecar=None), "pool.*mamba.*one of kv"),
        (lambda: himamba(state_page=2), "mamba page_size: got 1, expected the host pool's, 2"),
        (lambda: himamba(enable_mamba_extra_buffer=False), "page_size.*2"),
        (lambda: mamba(), "page_size.*enable_mamba_extra_buffer"),
        (lambda: mamba(1, is_eagle=True), "is_eagle.*enable_mamba_extra_buffer"),
        (lambda: mamba(1, mamba_cache_chunk_size=0), "mamba_cache_chunk_size: got 0"),
        (lambda: mamba(1, emit_group_events=True), "emit_group_events: got True"),
        (lambda: unified(states(), states()), "components"),
        (lambda: unified(allocator=SWATokenToKVPoolAllocator(16, 16, 2)), "allocator"),
        (lambda: unified(windows()), "allocator"),
        (lambda: windows(0), "sliding_window_size"),
        (lambda: states(mamba_cache_chunk_size=0), "chunk_size"),
        (lambda: unified(states(enable_mamba_extra_buffer=False)), "page_size"),
        (lambda: unified(states(enable_mamba_extra_buffer=False), page_size=1, is_eagle=True), "is_eagle"),
        (lambda: CacheRig("unified+swa").cache.component(ComponentType.MAMBA), "MAMBA.*SWA"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_its_numbers(build, words):
    with pytest.raises(InvalidValueError, match=words):
        build()


def test_the_order_of_eviction_is_no_choice_with_recurrent_states():
    with pytest.raises(TypeError, match="eviction_policy"):
        himamba(eviction_policy="fifo")


def test_a_host_tier_must_know_every_kind_by_its_own_allocator_and_comes_once():
    component, pool = states(), pages()
    cache = unified(component, allocator=pool)
    foreign, own = (entry(PoolName.MAMBA, allocator) for allocator in (slots(), component.allocator))
    for sidecars, words in (((), "mamba"), ((foreign,), "mamba_allocator")):
        with pytest.raises(InvalidValueError, match=words):
            cache.init_hicache(controller(pool, *sidecars))
    assert cache.cache_controller is None
    attached = controller(pool, own)
    cache.init_hicache(attached)
    assert cache.cache_controller is attached
    with pytest.raises(InvalidValueError, match="controller"):
        cache.init_hicache(attached)


@rigs("unified", tiers=1, device_pages=4)
def test_a_host_tier_comes_before_anything_is_cached(rig):
    rig.insert(A)
    with pytest.raises(InvalidValueError, match="before anything is cached"):
        rig.cache.init_hicache(controller(rig.pool))


# --- inserts ---


@pytest.mark.parametrize(
    ("name", "params", "error"),
    [
        ("radix", {"value": np.arange(2, 5)}, r"value: got '3 rows'.*4 units"),
        ("unified", {"value": np.arange(2, 5)}, "value"),
        ("unified", {"value": None}, "value"),
        ("unified+mamba", {"key": RadixKey([1]), "value": np.arange(1), "mamba_value": np.array([1])}, "value"),
        ("unified+mamba", {}, "mamba_value"),
        ("unified+mamba", {"mamba_value": np.array([1, 2])}, "mamba_value"),
        ("unified+swa", {"swa_evicted_seqlen": 1}, "swa_evicted_seqlen"),
        ("unified+swa", {"swa_evicted_seqlen": -2}, "swa_evicted_seqlen"),
        ("unified+swa", {}, "without an SWA row"),
        ("mamba", {}, "mamba_value"),
        ("mamba", {"mamba_value": np.array([1, 2])}, "mamba_value"),
        ("mamba", {"value": None, "mamba_value": np.array([1])}, "value: got '0 rows'"),
    ]
    + [
        ("mamba", {"key": RadixKey(range(units)), "value": np.arange(4, 4 + rows), "mamba_value": np.array([1])}, error)
        for units, rows, error in ((3, 3, "value: got '3 rows'"), (4, 3, "'3 rows'"), (4, 5, "'5 rows'"))
    ],
)
def test_an_insert_that_lacks_something_changes_nothing(name, params, error):
    rig = CacheRig(name)
    rows = rig.pool.alloc(4)
    with pytest.raises(InvalidValueError, match=error):
        rig.cache.insert(InsertParams(**{"key": RadixKey(AB), "value": rows} | params))
    rig.pool.free(rows)
    assert rig.cache.root_node.children == {}
    rig.check()


# --- components ---


def test_a_component_must_have_a_validator_that_knows_the_device_alone():
    with pytest.raises(TypeError, match=r"Lacking.create_match_validator must take match_device_only"):

        class Lacking(TreeComponent):
            kind: ClassVar = ComponentType.MAMBA

            def create_match_validator(self):  # type: ignore[override]
                return lambda node: True

    class Abstract(TreeComponent):
        kind: ClassVar = ComponentType.MAMBA

    with pytest.raises(TypeError, match="create_match_validator"):
        Abstract()  # type: ignore[abstract]


@rigs("unified+swa+mamba")
def test_full_data_of_a_node_is_a_view_of_what_every_node_has(rig):
    (node,) = rig.turns(A)
    full, swa, mamba = node.component_data
    assert (full.value is node.value, full.host_value is node.host_value) == (True, True)
    assert (full.lock_ref, full.host_lock_ref) == (node.lock_ref, node.host_ref_counter)
    assert (swa, mamba) == (node.auxiliary(ComponentType.SWA), node.auxiliary(ComponentType.MAMBA))
    assert rig.cache.component(ComponentType.MAMBA) is rig.cache.auxiliaries[1]


# --- tiers that are absent ---

CALLS: dict[str, tuple[tuple[Any, ...], object]] = {
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
    "write_backup": ((AB,), 0),
    "load_back": ((AB,), None),
}


@rigs("radix", "mamba", ("unified+mamba+swa", {"tiers": 1}))
def test_a_cache_with_one_tier_takes_the_calls_for_others_and_does_nothing(rig):
    rig.insert(AB)
    rig.insert(AB)
    rig.cache.take_events()
    assert (rig.cache.host, rig.cache.store, rig.cache.cache_controller) == (None, None, None)
    for call, (arguments, answer) in CALLS.items():
        given = [rig.node_of(AB) if each is AB else each for each in arguments]
        assert getattr(rig.cache, call)(*given) == answer
    rig.cache.prefetch_from_storage("r", rig.cache.root_node, [1] * 8)
    assert (rig.cache.ongoing_prefetch, rig.cache.take_events()) == ({}, [])
    with pytest.raises(InvalidValueError, match="store: got 'MemoryStorage', expected a cache with a host tier"):
        rig.cache.attach_store(MemoryStorage())


# --- damage ---


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda c, n: setattr(c.tree, "evictable_size", 3), "evictable size.*3 != 2"),
        (lambda c, n: setattr(c.tree, "protected_size", 2), "protected size.*2 != 0"),
        (lambda c, n: c.evictable_leaves.discard(n), "evictable leaves"),
        (lambda c, n: setattr(n, "lock_ref", -1), "lock_ref -1"),
        (lambda c, n: setattr(n, "value", None), "is on no tier"),
        (lambda c, n: setattr(c.states, "evictable_size", 3), "evictable mamba rows.*3 != 1"),
        (lambda c, n: setattr(c.states, "protected_size", 2), "protected mamba rows.*2 != 0"),
        (lambda c, n: setattr(c.states.data(n), "lock_ref", 1), "0 <= mamba_lock_ref <= lock_ref"),
        (lambda c, n: c.states.device_lru_list.pop(n), "mamba list: nodes listed"),
    ],
)
def test_a_recount_finds_damage_and_states_both_figures(damage, what):
    cache = CacheRig("mamba").cache
    cache.insert(InsertParams(RadixKey(A), np.arange(2, 4), mamba_value=np.array([1])))
    (node,) = cache.root_node.children.values()
    cache.sanity_check()
    damage(cache, node)
    with pytest.raises(CacheStateError, match=what):
        cache.sanity_check()


def test_a_recount_finds_a_child_that_is_locked_under_an_unlocked_parent():
    rig = CacheRig("radix")
    rig.turns(A, AB)
    rig.node_of(AB).lock_ref = 1
    with pytest.raises(CacheStateError, match="parent"):
        rig.cache.sanity_check()


def test_a_check_of_the_tests_finds_pages_without_an_owner():
    pool = PagedTokenToKVPoolAllocator(16, 4)
    cache = RadixCache(page_size=4, allocator=pool)
    rows = pool.alloc(8)
    check_cache(cache, rows)
    with pytest.raises(CacheStateError, match=r"free 2 \+ tree 0 \+ requests 0, pages of the pool: 2 != 4"):
        check_cache(cache, rows[:0])
    pool.free(rows)
    with pytest.raises(CacheStateError, match="distinct pages"):
        check_cache(cache, rows)


@rigs("unified+mamba", "unified+swa", "unified+swa+mamba")
def test_every_component_answers_for_any_tier_and_for_the_device_alone(rig):
    rig.demoted(AB)
    node = rig.node_of(AB)
    for component in rig.cache.auxiliaries:
        assert component.create_match_validator()(node)
        assert not component.create_match_validator(match_device_only=True)(node)
