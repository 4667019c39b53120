"""Room for a load is made by evicting other nodes. The data that the load needs stays on its tiers."""

import pytest

from engine_cache import EvictParams
from tests.support.caches.unified_oracle import num_usable, pages_along
from tests.support.caches.unified_rig import UnifiedRig

pytestmark = pytest.mark.torch

A, AB, ABC, ABCD = [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3, 4, 4]
X, Y = [7, 7], [8, 8]


def filled(*prompts, kinds=("swa",), **params):
    rig = UnifiedRig(kinds, **params)
    for tokens in prompts:
        rig.insert(tokens)
        rig.settle()
    return rig


def usable(rig, tokens, tiers):
    return num_usable(rig, pages_along(rig, tokens, None), tiers)


def test_rows_of_the_window_that_are_on_the_device_stay_there():
    """The window of D consists of B on the device, and C and D on the host only. No other row can be evicted."""
    rig = filled(A, AB, ABC, ABCD, window=6, swa_pages=4, host_pages=14)
    (swa,) = rig.cache.auxiliaries
    rig.cache.evict(EvictParams(2))  # D
    for tokens in (A, ABC):
        swa.free_on_device(rig.node_of(tokens))
    swa.free_on_host(rig.node_of(A))
    for tokens in (X, Y):
        rig.insert(tokens)
        rig.settle()
        rig.cache.inc_lock_ref(rig.node_of(tokens))
    assert rig.swa.swa.available_size() == 2  # and C and D need four
    match = rig.match(ABCD)
    assert (match.host_hit_length, match.swa_host_hit_length) == (8, 4)
    (rows, node), _, _ = rig.load_back(match)
    assert (rows.tolist(), node) == ([], rig.cache.root_node)
    assert rig.data(rig.node_of(AB), "swa").value is not None
    assert usable(rig, ABCD, {"d", "h"}) == 4
    rig.check()


@pytest.mark.parametrize("is_kv_there", [True, False])
def test_what_makes_room_on_the_device_does_not_take_what_is_loaded_off_the_host(is_kv_there):
    """X can leave the device only for the host, where A fills what X needs: with its rows of the window alone, or with
    its KV, too."""
    rig = filled(A, write_policy="write_back", window=2, swa_pages=1, swa_host_pages=1 if is_kv_there else 2)
    rig.cache.evict(EvictParams(2))
    if is_kv_there:
        rig.cache.release(rig.load_back(rig.match(A))[2])
        rig.settle()
        rig.cache.auxiliaries[0].free_on_device(rig.node_of(A))
    else:
        taken = rig.host.alloc(rig.host.available_size())
    rig.insert(X)
    match = rig.match(A)
    assert (match.swa_host_hit_length, rig.swa.swa.available_size()) == (2, 0)
    (rows, node), _, _ = rig.load_back(match)
    assert (rows.tolist(), node) == ([], rig.cache.root_node)
    assert (usable(rig, A, {"d", "h"}), usable(rig, X, {"d"})) == (1, 1)
    if not is_kv_there:
        rig.host.free(taken)
    rig.check()
