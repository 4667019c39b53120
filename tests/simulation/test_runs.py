"""Whole runs: caches, publishers, logs, index and policies together."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from indexer.replay import Replay
from kv_events.log.memory import MemoryLog
from kv_events.schema import MEDIA, StorageMedium
from publisher.sinks.base import OutRecord
from publisher.sinks.memory import MemorySink
from simulation import (
    CACHES,
    POLICIES,
    MooncakeTrace,
    PolicyReport,
    Request,
    SimulationSettings,
    WorkloadSettings,
    generate,
    simulate,
)
from simulation.live import SimulationError, live_fleet, memory_transport
from simulation.run import TimedFleet
from simulation.worker import divergent_pages
from tests.support.log.records import log_records
from tests.support.log.view_facts import held_pages

SMALL = SimulationSettings(workers=4, capacity_tokens=16_384, page_size=16)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Enough for every worker to evict."""
    return generate(WorkloadSettings(num_requests=200, seed=1))


def _facts(report: PolicyReport) -> dict[str, object]:
    return {name: value for name, value in report.to_dict().items() if name != "seconds"}


def test_a_run_is_deterministic_and_its_curves_add_up_to_its_report(requests: list[Request]) -> None:
    report, again = simulate(requests, SMALL, ["overlap-load", "overlap-load"])
    assert _facts(report) == _facts(again)
    assert report.prompt_tokens == sum(len(request.token_ids) for request in requests)
    assert report.curves is not None
    assert report.curves.prompt_tokens.values.sum(axis=0).tolist() == [load.prompt_tokens for load in report.workers]
    assert report.curves.found_tokens.values.sum(axis=0).tolist() == [load.found_tokens for load in report.workers]
    assert report.curves.bins.last_ms == int(max(request.arrival_s for request in requests) * 1000)


def test_no_view_diverges_and_who_asks_finds_more_with_an_even_load_while_progress_rises_to_the_whole(
    requests: list[Request],
) -> None:
    seen: list[tuple[str, int, int]] = []
    reports = simulate(requests, SMALL, POLICIES, lambda *step: seen.append(step))
    assert [(each.requests, each.divergent_pages) for each in reports] == [(len(requests), 0)] * 4
    blind, other_blind, aware, other_aware = reports
    for each in (aware, other_aware):
        assert each.found_share > 1.2 * max(blind.found_share, other_blind.found_share)
        assert each.imbalance < 1.7
    assert [each.queries for each in reports] == [0, 0, len(requests), len(requests)]
    for policy in POLICIES:
        done = [step[1] for step in seen if step[0] == policy]
        assert done == sorted(done)
        assert done[-1] == len(requests)


@pytest.mark.soak
def test_the_real_trace_does_not_diverge_and_prefixes_are_found(trace_path: Path) -> None:
    trace = list(islice(MooncakeTrace(trace_path), 1500))
    settings = SimulationSettings(workers=8, capacity_tokens=2**18, page_size=64)
    blind, aware = simulate(trace, settings, ["round-robin", "overlap-load"])
    assert blind.divergent_pages == aware.divergent_pages == 0
    assert aware.found_share > 1.5 * blind.found_share
    assert aware.imbalance < 1.3


# --- tiers and states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
async def test_no_view_diverges_on_any_medium(cache: str, requests: list[Request]) -> None:
    settings = replace(SMALL, cache=cache, disk_ratio=3.0)
    async with live_fleet(settings, "overlap-load", memory_transport(MemoryLog())) as fleet:
        for request in requests:
            fleet.run.step(request)
        await fleet.wait_until_synced()
        for worker in fleet.run.workers:
            view = fleet.consumer.namespaces.view(worker.publisher.stream)
            assert divergent_pages(worker, view) == dict.fromkeys(MEDIA, 0)
            on_tiers = [
                any(True for _ in worker.cache.iter_resident(tier)) for tier in (StorageMedium.GPU, StorageMedium.CPU)
            ]
            assert on_tiers == [True, settings.has_tiers]
            assert (worker.tiers is not None and worker.tiers.store.get_stats().num_evicted > 0) == settings.has_tiers


# --- a recorded run -------------------------------------------------------------------------------------------------


def _views(replay: Replay) -> dict[str, set[int]]:
    return {view.stream.worker: set(held_pages(view)) for view in replay.namespaces.views}


def test_a_recorded_run_ends_with_what_the_caches_hold(tmp_path: Path, requests: list[Request]) -> None:
    settings = SimulationSettings(workers=4, capacity_tokens=16_384, page_size=16, event_log_dir=tmp_path)
    recorded = simulate(requests, settings, ["round-robin"])
    assert _facts(*recorded) == _facts(*simulate(requests, SMALL, ["round-robin"]))
    replay = Replay().apply_all(log_records(tmp_path / "round-robin"))
    fleet = TimedFleet(SMALL, "round-robin")
    for request in requests:
        fleet.arrive(request)
    fleet.run_until(math.inf)
    caches = {
        worker.publisher.stream.worker: {page.sequence_hash for page in worker.cache.iter_resident(StorageMedium.GPU)}
        for worker in fleet.run.workers
    }
    assert _views(replay) == caches


# --- live -----------------------------------------------------------------------------------------------------------


async def test_a_log_too_small_to_keep_what_was_written_is_made_up_for(requests: list[Request]) -> None:
    async with live_fleet(SMALL, "round-robin", memory_transport(MemoryLog(capacity_bytes=2000))) as fleet:
        for request in requests:  # immediately: the consumer cannot have caught up
            fleet.run.step(request)
        await fleet.wait_until_synced()
        assert all(view.counters.gaps for view in fleet.consumer.namespaces.views)
        assert fleet.run.report(0.0).divergent_pages == 0


async def test_a_publisher_that_dies_ends_a_live_run_with_its_name() -> None:
    class DyingSink(MemorySink):
        async def send(self, records: Sequence[OutRecord]) -> None:
            raise RuntimeError("broken for good")

    transport = memory_transport(MemoryLog())._replace(sink=lambda _: DyingSink(MemoryLog()))
    with pytest.raises(SimulationError, match=r"worker-0.*broken for good"):
        async with live_fleet(SMALL, "random", transport):
            pass
