import pytest

from engine_cache import Lane, StoragePolicy
from kv_events.errors import InvalidValueError
from tests.support.caches.prefetch_steps import attach, nothing_is_left, prefetch, run
from tests.support.caches.tier_rig import Rig

pytestmark = pytest.mark.torch


def test_best_effort_takes_what_is_there(rig):
    prefetch(rig)
    for _ in range(2):
        rig.engine.step(Lane.PREFETCH)
    assert rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 4
    rig.check()
    run(rig)
    assert nothing_is_left(rig)
    assert rig.host.available_size() == rig.host.size - 4


def test_wait_complete_waits_for_all_of_the_hit(store):
    rig = attach(Rig(), store, stop="wait_complete")
    prefetch(rig)
    while rig.engine.num_queued(Lane.PREFETCH):
        assert not rig.cache.check_prefetch_progress("r")
        rig.engine.step(Lane.PREFETCH)
    assert rig.cache.check_prefetch_progress("r")
    assert rig.cache.pop_prefetch_loaded_tokens("r") == 8


def test_timeout_waits_for_its_time(store):
    rig = attach(Rig(), store, stop="timeout", timeout_base_s=1000)
    prefetch(rig)
    rig.engine.step(Lane.PREFETCH)
    assert not rig.cache.check_prefetch_progress("r")
    rig.cache.store.io.policy = StoragePolicy(stop="timeout", timeout_base_s=0, timeout_per_1024_s=0)
    assert rig.cache.check_prefetch_progress("r")
    run(rig)
    assert nothing_is_left(rig)


def test_the_timeout_grows_with_the_hit_up_to_its_cap():
    policy = StoragePolicy()
    assert policy.timeout_s(0) == 2.0
    assert policy.timeout_s(10 * 1024) == pytest.approx(3.0)
    assert policy.timeout_s(10**9) == 30.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", "never"), ("prefetch_threshold", 0), ("batch_pages", 0), ("timeout_base_s", -1), ("timeout_cap_s", -1)],
)
def test_a_bad_policy_is_refused(field, value):
    with pytest.raises(InvalidValueError, match=f"{field}: got {value!r}"):
        StoragePolicy(**{field: value})
