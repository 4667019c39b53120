"""The number of tokens that a prefetch added is kept until it is queried, but not indefinitely."""

import pytest

from tests.support.caches.prefetch_steps import PROMPT, prefetch, run

pytestmark = pytest.mark.torch


def fetch(rig, req_id, tokens=PROMPT):
    prefetch(rig, tokens, req_id)
    run(rig)
    assert rig.cache.check_prefetch_progress(req_id)
    rig.cache.check_hicache_events()


def forget(rig):
    """Remove the prompt from the tree."""
    rig.cache.evict_host(100)


def test_only_what_was_added_is_noted(rig):
    fetch(rig, "nothing", [9, 9, 8, 8])
    fetch(rig, "all")
    fetch(rig, "again")
    assert rig.cache.prefetch_loaded_tokens_by_reqid == {"all": 8}
    assert [rig.cache.pop_prefetch_loaded_tokens(req_id) for req_id in ("nothing", "all", "all")] == [0, 8, 0]


def test_notes_that_no_caller_asks_for_go_oldest_first(rig, monkeypatch):
    monkeypatch.setattr("engine_cache.cache._MOST_LOADED_NOTES", 2)
    for req_id in ("a", "b", "a", "c"):
        fetch(rig, req_id)
        forget(rig)
    assert rig.cache.prefetch_loaded_tokens_by_reqid == {"a": 8, "c": 8}
