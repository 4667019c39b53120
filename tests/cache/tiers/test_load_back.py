"""Load-backs of a match: what is copied, what they are held to, room for them, and failed ones."""

import pytest

from engine_cache import EvictParams, InitLoadBackParams, Lane, Request, TransferError
from tests.models.cache_checks import check_cache
from tests.models.cache_oracle import num_usable, pages_along
from tests.rigs.cache import AB, ABC, CPU, EVERYTHING, GPU, NOTHING, A, CacheRig, removed, rigs, stored
from tests.rigs.cache_steps import holdings, init_load_back

KV = ("hiradix", "unified")
STATES = ("himamba", "unified+mamba")
ALL = (*KV, *STATES, "unified+swa", "unified+mamba+swa")


# --- what is loaded ---


@rigs(*ALL)
def test_what_was_demoted_comes_back_and_is_reported_from_the_root_down(rig):
    rig.demoted(A, AB, ABC)
    match = rig.match(ABC)
    assert (len(match.device_indices), match.host_hit_length) == (0, 6)
    (rows, node), req, lock = rig.load_back(match)
    rig.cache.release(lock)
    assert rig.events() == stored(GPU, [1, 1], [2, 2], [3, 3])
    assert node is match.best_match_node is rig.node_of(ABC)
    assert rows.tolist() == [row for tokens in (A, AB, ABC) for row in rig.node_of(tokens).value]
    assert rig.cache.protected_size() == 6, "until the load has ended"
    assert not any(rig.cache.evict(EVERYTHING))
    rig.settle()
    rig.check()
    assert (rig.cache.protected_size(), rig.events(), rig.held(CPU)) == (0, [], rig.held(GPU))
    assert rig.match(ABC).device_indices.tolist() == rows.tolist()
    assert rig.ends("mamba") == ({tuple(ABC)} if "mamba" in rig.kinds else set())
    assert rig.ends("swa") == ({tuple(AB), tuple(ABC)} if "swa" in rig.kinds else set()), "one window"
    assert (req is not None and req.mamba_pool_idx is not None) == ("unified" in rig.name and "mamba" in rig.kinds)
    rig.end_requests()


@rigs("unified+mamba")
def test_nothing_is_gained_when_the_request_is_at_the_best_match_already(rig):
    _, node, _ = rig.turns(A, AB, ABC)
    rig.cache.states.free_on_device(node)
    req = Request("r", [], 0, last_node=node, mamba_host_hit_length=1)
    rows, last = rig.cache.init_load_back(InitLoadBackParams(node, 0, req=req))
    assert (rows.tolist(), last, rig.has(AB, "mamba")) == ([], node, (True, True))
    rig.slots.free(req.mamba_pool_idx)
    rig.settle()


@rigs(*STATES)
def test_a_load_is_a_use(rig):
    rig.demoted(A)
    rig.turns([3, 3])
    rig.load(A)
    rig.settle()
    rig.end_requests()
    assert rig.cache.evict(EvictParams(0, mamba_num=1))[:2] == (2, 1)
    assert rig.match([3, 3]).host_hit_length == 2


@rigs("himamba")
def test_a_load_of_a_state_is_a_use_of_the_pages_too(rig):
    rig.demoted(A)
    rig.turns([3, 3])
    match = rig.match(A)
    rig.match([3, 3])
    rig.cache.release(rig.load_back(match)[2])
    rig.settle()
    rig.end_requests()
    rig.cache.evict(EvictParams(2))
    assert [rig.match(key).host_hit_length for key in (A, [3, 3])] == [0, 2]


@rigs("unified+swa", "unified+mamba+swa", slots=8)
def test_a_window_that_is_partly_on_the_device_is_free_again_after_the_load(rig):
    rig.demoted(A, AB, ABC)
    for tokens in (AB, ABC):
        rig.load(tokens)
        rig.settle()
    rig.end_requests()
    rig.check()
    assert rig.has(ABC, "swa")[0]
    rig.cache.evict(EVERYTHING)
    assert [rig.has(tokens, "swa")[0] for tokens in (A, AB, ABC)] == [False] * 3


# --- thresholds and quotas ---


@pytest.mark.parametrize(
    ("threshold", "quota", "is_loaded"),
    [(5, None, False), (4, None, True), (1, 0, False), (1, 3, False), (1, 5, False), (1, 6, True)],
)
@rigs(*KV)
def test_a_load_that_is_too_small_or_beyond_the_quota_is_refused_without_a_trace(rig, threshold, quota, is_loaded):
    """The quota also covers the two units that are on the device, but were not protected before."""
    rig.turns(A, AB, ABC)
    rig.cache.host.load_back_threshold = threshold
    rig.cache.evict(EvictParams(4))
    rig.cache.take_events()
    match = rig.match(ABC)
    before = holdings(rig)
    rows, node = init_load_back(rig, match, quota, Request("r", [], 0, last_node=match.last_device_node))
    assert (len(rows), node) == ((4, match.best_match_node) if is_loaded else (0, match.last_device_node))
    assert is_loaded or (holdings(rig), rig.events()) == (before, [])


# --- room ---


@rigs("hiradix", ("himamba", {"slots": 1}), "unified", device_pages=3)
def test_a_load_makes_room_on_the_device(rig):
    rig.demoted(AB)
    rig.turns([5, 5, 6, 6])
    rig.load(AB)
    assert rig.events() == removed(GPU, 2) + stored(GPU, [1, 1], [2, 2])


@rigs("unified", page_size=1, device_pages=8, host_pages=12)
def test_a_load_of_a_unified_tree_evicts_only_what_is_missing(rig):
    rig.demoted([1, 1], [1, 2])
    for token in range(30, 37):
        rig.insert([token], chunked=True)
    rig.load([1, 2])
    assert len(rig.held(GPU)) == 8


def usable(rig, tokens, tiers):
    return num_usable(rig, pages_along(rig, tokens, None), tiers)


@pytest.mark.parametrize("is_kv_there", [True, False])
def test_what_makes_room_on_the_device_does_not_take_what_is_loaded_off_the_host(is_kv_there):
    """X can leave the device only for the host, where A fills what X needs: with its rows of the window alone, or with
    its KV, too."""
    sizes = {"window": 2, "swa_pages": 1, "swa_host_pages": 1 if is_kv_there else 2}
    rig = CacheRig("unified+swa", write_policy="write_back", **sizes)
    rig.demoted(A)
    taken = NOTHING
    if is_kv_there:
        rig.load(A)
        rig.settle()
        rig.cache.auxiliaries[0].free_on_device(rig.node_of(A))
    else:
        taken = rig.host.alloc(rig.host.available_size())
    rig.insert([7, 7])
    assert (rig.match(A).swa_host_hit_length, rig.swa.swa.available_size()) == (2, 0)
    rows, node = rig.load(A)
    assert (rows.tolist(), node) == ([], rig.cache.root_node)
    assert (usable(rig, A, {"d", "h"}), usable(rig, [7, 7], {"d"})) == (1, 1)
    rig.host.free(taken)
    rig.check()


# --- failed loads: no match returns rows that were never filled, until the cache is reset ---

OTHER = [3, 3, 4, 4]
CLASSES = ("hiradix", "himamba", "unified")


@pytest.mark.parametrize("is_noticed", [False, True])
@rigs(*CLASSES)
def test_everything_that_could_hand_out_its_rows_reports_it_until_a_reset(rig, monkeypatch, is_noticed):
    rig.demoted(AB, OTHER)
    rig.cache.load_back(rig.match(AB).best_match_node)
    consumer = rig.cache.ready_to_load_host_cache()
    with monkeypatch.context() as patch:
        patch.setattr(rig.host, "load_to_device_per_layer", lambda *_: 1 / 0)
        rig.engine.step(Lane.LOAD)
    if is_noticed:
        with pytest.raises(TransferError):
            rig.cache.loading_check()
    other = rig.node_of(OTHER)
    calls = [
        lambda: rig.match(AB),
        lambda: rig.match(OTHER),
        lambda: rig.insert(OTHER),
        lambda: rig.cache.load_back(other),
        lambda: rig.cache.loading_check(),
        lambda: rig.cache.check_hicache_events(),
        lambda: check_cache(rig.cache),
        lambda: rig.controller.wait_for_layer(consumer, rig.controller.transfer_layer_num - 1),
    ]
    for call in [*calls, *calls]:
        with pytest.raises(TransferError, match="division by zero"):
            call()
    rig.reset()
    assert rig.cache.ongoing_load_back == {}
    assert len(rig.match(AB).device_indices) == 0
    assert rig.insert(AB).prefix_len == 0
    rig.settle()


@rigs(*CLASSES)
def test_a_load_before_the_one_that_failed_is_not_blamed(rig, monkeypatch):
    last = rig.controller.transfer_layer_num - 1
    rig.demoted(AB, OTHER)
    for tokens in (AB, OTHER):
        rig.cache.load_back(rig.match(tokens).best_match_node)
        rig.cache.ready_to_load_host_cache()
    rig.engine.step(Lane.LOAD)
    rig.controller.wait_for_layer(0, last)
    monkeypatch.setattr(rig.host, "load_to_device_per_layer", lambda *_: 1 / 0)
    rig.engine.step(Lane.LOAD)
    rig.controller.wait_for_layer(0, last)
    with pytest.raises(TransferError):
        rig.controller.wait_for_layer(1, last)
    rig.reset()


@rigs("unified+mamba+swa")
def test_there_is_nothing_to_load_of_what_is_on_the_device(rig):
    rig.turns(A, AB, ABC)
    match = rig.match(ABC)
    (rows, node), req, lock = rig.load_back(match)
    rig.cache.release(lock)
    assert (rows.tolist(), node, req.mamba_pool_idx) == ([], match.last_device_node, None)
    assert rig.cache.ongoing_load_back == {}
