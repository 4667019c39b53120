"""The comparison of a view with its cache finds the differences."""

from __future__ import annotations

import numpy as np

from engine_cache import EvictParams
from engine_cache.storage import page_key
from kv_events.schema import BlockStored, StorageMedium
from simulation.byteless_store import BytelessStore
from simulation.run import DirectFleet
from tests.support.log.records import words


def _fleet(make_fleet, prompts, **changes: object) -> DirectFleet:
    fleet: DirectFleet = make_fleet(workers=1, **changes)
    fleet.run.workers[0].serve(prompts.request(160))
    return fleet


def _store(fleet: DirectFleet) -> BytelessStore:
    tiers = fleet.run.workers[0].tiers
    assert tiers is not None
    return tiers.store


def _divergence(fleet: DirectFleet) -> int:
    return fleet.run.report(0.0).divergent_pages


def test_a_view_that_heard_everything_does_not_diverge(make_fleet, prompts) -> None:
    fleet = _fleet(make_fleet, prompts)
    fleet.deliver(0)
    assert _divergence(fleet) == 0


def test_pages_that_the_router_has_not_heard_of_count(make_fleet, prompts) -> None:
    assert _divergence(_fleet(make_fleet, prompts)) == 10


def test_pages_that_the_cache_has_lost_in_silence_count(make_fleet, prompts) -> None:
    fleet = _fleet(make_fleet, prompts)
    fleet.deliver(0)
    fleet.run.workers[0].cache.evict(EvictParams(160))
    assert _divergence(fleet) == 10


def test_pages_on_a_tier_where_the_cache_has_none_count(make_fleet, prompts) -> None:
    fleet = _fleet(make_fleet, prompts)
    publisher = fleet.run.workers[0].publisher
    publisher.publish([BlockStored([7], None, [], 16, None, StorageMedium.CPU, None, words([77]))])
    fleet.deliver(0)
    assert _divergence(fleet) == 1


def test_pages_on_every_tier_count_once_a_tier(make_fleet, prompts) -> None:
    assert _divergence(_fleet(make_fleet, prompts, cache="hiradix")) == 30


def test_pages_that_the_disk_has_lost_in_silence_count(make_fleet, prompts) -> None:
    fleet = _fleet(make_fleet, prompts, cache="hiradix")
    fleet.deliver(0)
    assert _divergence(fleet) == 0
    _store(fleet).clear()
    assert _divergence(fleet) == 10


def test_pages_that_the_disk_has_and_no_one_reported_count(make_fleet, prompts) -> None:
    fleet = _fleet(make_fleet, prompts, cache="hiradix")
    fleet.deliver(0)
    _store(fleet).batch_set_v1([page_key("0" * 64)], np.arange(16))
    assert _divergence(fleet) == 1
