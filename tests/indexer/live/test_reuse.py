"""From the states of a cache to a router's answer: the reusable prefix is what the cache matches."""

from dataclasses import replace

import pytest

from kv_events.hashing import namespace_seed, sequence_hashes
from kv_events.kafka.settings import KafkaSettings
from kv_events.log.memory import MemoryLog
from simulation import Request, SimulationSettings, WorkloadSettings, generate
from simulation.live import Transport, kafka_transport, memory_transport, run_live
from simulation.run import TimedFleet

HYBRID = ["mamba", "himamba"]
SMALL = SimulationSettings(workers=3, capacity_tokens=8192, page_size=16, groups=True, cache="mamba", disk_ratio=4.0)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Enough for every worker to evict KV and states."""
    return generate(WorkloadSettings(num_requests=150, seed=1))


def held_of_full_kv(fleet: TimedFleet, request: Request) -> list[int]:
    """Return the tokens of the prompt whose full KV each worker holds, by its view."""
    hashes = sequence_hashes(request.token_ids, SMALL.page_size, namespace_seed(cache_salt=request.extra_key))
    found = []
    for worker in fleet.run.workers:
        view = fleet.run._namespaces.view(worker.publisher.stream)
        held = view.index.find(hashes) if view is not None else None
        is_found = held is not None and view is not None and view.number in held.streams
        found.append(int(held.pages[view.number, -1]) * SMALL.page_size if held and view and is_found else 0)
    return found


@pytest.mark.parametrize("cache", HYBRID)
def test_what_can_be_reused_is_what_the_cache_matches_at_every_moment(cache: str, requests: list[Request]) -> None:
    fleet = TimedFleet(replace(SMALL, cache=cache), "round-robin")
    router = fleet.run.router
    lengths: list[tuple[int, int]] = []
    for request in requests:
        fleet.advance(request.arrival_s)
        matched = [worker.match_length(request) for worker in fleet.run.workers]
        assert router.reusable(request) == matched
        lengths += zip(matched, held_of_full_kv(fleet, request), strict=True)
        fleet.deliver(fleet.run.step(request))
    assert any(0 < reusable < longest for reusable, longest in lengths)  # the comparison is not empty
    assert any(reusable == longest > 0 for reusable, longest in lengths)


@pytest.mark.parametrize("cache", HYBRID)
async def test_no_answer_diverges_over_a_running_log(cache: str, requests: list[Request]) -> None:
    report = await run_live(requests, replace(SMALL, cache=cache), "overlap-load", memory_transport(MemoryLog()))
    assert (report.divergent_pages, report.divergent_answers) == (0, 0)


async def test_no_answer_diverges_over_a_broker(kafka_bootstrap: str, requests: list[Request]) -> None:
    transport: Transport = kafka_transport(
        KafkaSettings(kafka=kafka_bootstrap, events_topic="reuse-events", control_topic="reuse-control")
    )
    report = await run_live(requests[:60], SMALL, "round-robin", transport)
    assert (report.requests, report.divergent_pages, report.divergent_answers) == (60, 0, 0)


def test_an_answer_that_is_wrong_is_counted(requests: list[Request]) -> None:
    fleet = TimedFleet(SMALL, "round-robin")
    for request in requests[:30]:
        fleet.advance(request.arrival_s)
        fleet.run.step(request)
    for publisher in (worker.publisher for worker in fleet.run.workers):
        fleet._apply(publisher, force=True)  # events of the groups are withheld
    assert fleet.run.report(0.0).divergent_answers > 0


def test_who_does_not_ask_for_groups_publishes_none(requests: list[Request]) -> None:
    fleet = TimedFleet(replace(SMALL, groups=False), "round-robin")
    fleet.deliver(fleet.run.step(requests[0]))
    assert {namespace.key.model for namespace in fleet.run._namespaces} == {"simulation-round-robin"}
