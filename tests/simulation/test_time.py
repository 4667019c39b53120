"""Engines that need time: steps by hand, what always holds, and the agreement with engines that need none."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from simulation import EngineSettings, PolicyReport, Request, SimulationSettings, WorkloadSettings, generate, simulate
from simulation.report import Ended, Latency
from simulation.run import TimedFleet
from tests.support.commands import invoke

PAGE = 16
ROUND = EngineSettings(
    max_batch_tokens=100, max_requests=3, prefill_s=1.0, decode_s=0.5, token_s=0.01, attention_s=1e-4, context_s=1e-3
)
"""So that a person can add the times up."""
ONE = SimulationSettings(workers=1, capacity_tokens=4096, page_size=PAGE, engine=ROUND)


def tokens(length: int, seed: int = 0) -> np.ndarray:
    """Random tokens, which share nothing with those of other seeds."""
    return np.random.default_rng(seed).integers(0, 100_000, length, dtype=np.uint32)


def timed(requests: Sequence[Request], settings: SimulationSettings = ONE) -> tuple[list[Ended], PolicyReport]:
    """The requests in the order in which they ended, and the report."""
    fleet = TimedFleet(settings, "round-robin")
    for request in requests:
        fleet.arrive(request)
    fleet.run_until(math.inf)
    return fleet._ended, fleet.report(0.0)


def test_a_prompt_is_computed_in_chunks_and_each_token_attends_to_those_before_it() -> None:
    ((_, ttft_s, itl_s),), _ = timed([Request(3.0, tokens(250), output_length=3)])
    chunks = (1 + 100 * 0.01 + 100 * 50e-4) + (1 + 100 * 0.01 + 100 * 150e-4) + (1 + 50 * 0.01 + 50 * 225e-4)
    assert ttft_s == pytest.approx(chunks)
    decode = [0.5 + 0.01 + 250e-3, 0.5 + 0.01 + 251e-3]
    assert itl_s == pytest.approx(sum(decode) / 2)


def test_decode_goes_on_while_another_prompt_is_computed_with_what_is_left_of_the_budget() -> None:
    """First: 32 tokens at 0, done at 1.3712. Second: 120 tokens at 1.4, which wait for the step that is running."""
    ended, report = timed([Request(0.0, tokens(32), output_length=5), Request(1.4, tokens(120, 1), output_length=1)])
    first_s = 1 + 0.32 + 32 * 16e-4
    alone_s = 0.5 + 0.01 + 0.032
    both_s = (1 + 0.99 + 99 * 49.5e-4) + (0.5 + 0.01 + 0.033)
    rest_s = (1 + 0.21 + 21 * (99 + 10.5) * 1e-4) + (0.5 + 0.01 + 0.034)
    last_s = 0.5 + 0.01 + 0.035
    by_arrival = {each.arrival_s: each for each in ended}
    assert by_arrival[0.0].ttft_s == pytest.approx(first_s)
    assert by_arrival[0.0].mean_itl_s == pytest.approx((alone_s + both_s + rest_s + last_s) / 4)
    assert by_arrival[1.4].ttft_s == pytest.approx(first_s + alone_s + both_s + rest_s - 1.4)
    assert report.latency is not None
    assert report.latency.itl_p99_s == pytest.approx(both_s)


def test_what_is_in_cache_is_not_computed_again_except_for_the_last_token() -> None:
    (_, again), report = timed([Request(0.0, tokens(96)), Request(100.0, tokens(96))])
    assert report.found_tokens == 96
    assert again.ttft_s == pytest.approx(1 + 0.01 + 95.5e-4)


def test_a_chunk_is_found_by_others_before_the_prompt_is_complete() -> None:
    long = tokens(300)
    _, report = timed([Request(0.0, long), Request(4.5, long[:98])])  # the first chunk ends at 2.5 and the second at 6
    assert report.found_tokens == 96


def test_no_more_requests_run_than_allowed_and_the_others_wait_their_turn() -> None:
    ended, _ = timed([Request(number / 100, tokens(20, number), output_length=50) for number in range(5)])
    order = sorted(ended, key=lambda each: each.arrival_s)
    firsts = [each.arrival_s + each.ttft_s for each in order]
    lasts = [each.arrival_s + each.ttft_s + 49 * each.mean_itl_s for each in order]
    assert firsts == sorted(firsts)
    assert firsts[3] > min(lasts[:3])
    assert firsts[2] < min(lasts)


def test_a_request_waits_until_the_cache_has_room_for_all_of_it() -> None:
    small = replace(ONE, capacity_tokens=160, engine=replace(ROUND, max_requests=10))
    first, second = (Request(0.0, tokens(100, seed), output_length=20) for seed in (1, 2))
    ended, report = timed([first, second], small)
    assert ended[1].ttft_s > ended[0].ttft_s + 19 * ended[0].mean_itl_s
    assert report.divergent_pages == 0
    assert [load.cut_requests for load in report.workers] == [0]


@pytest.mark.parametrize("cache", ["radix", "hiradix", "mamba", "himamba"])
@given(data=st.data())
@examples(max_examples=15, deadline=None)
def test_every_request_ends_and_none_is_faster_than_its_own_work(cache: str, data: st.DataObject) -> None:
    talks = [tokens(400, seed) for seed in range(3)]
    drawn = data.draw(
        st.lists(
            st.tuples(st.sampled_from(range(3)), st.integers(1, 400), st.integers(0, 60), st.integers(0, 40)),
            min_size=1,
            max_size=25,
        )
    )
    now, requests = 0.0, []
    for talk, length, num_output, pause in drawn:
        now += pause / 10
        output = talks[talk][length : length + num_output] if num_output % 2 else tokens(0)
        requests.append(Request(now, talks[talk][:length], output, output_length=num_output))
    settings = replace(ONE, workers=2, capacity_tokens=640, cache=cache, engine=replace(ROUND, max_requests=4))
    fleet = TimedFleet(settings, "overlap-load")
    for request in requests:
        fleet.arrive(request)
    fleet.run_until(math.inf)
    report = fleet.report(0.0)
    assert sorted(each.arrival_s for each in fleet._ended) == [request.arrival_s for request in requests]
    assert report.divergent_pages == 0
    assert (report.requests, report.prompt_tokens) == (len(requests), sum(len(each.token_ids) for each in requests))
    assert all(each.ttft_s >= ROUND.prefill_s + ROUND.token_s for each in fleet._ended)
    loads = fleet.run.router.candidates(requests[0], now)
    assert (loads.requests.tolist(), loads.prefill_tokens.tolist()) == ([0, 0], [0, 0]), "all were released"
    for worker in fleet.run.workers:
        assert worker.cache.protected_size() == 0
        held = worker.cache.evictable_size() + worker._allocator.available_size()
        assert held == settings.capacity_tokens, "rows are free or in the tree"


@pytest.mark.parametrize("policy", ["round-robin", "overlap-load", "lmetric"])
def test_with_a_tiny_load_as_much_is_found_as_without_time(policy: str) -> None:
    requests = generate(WorkloadSettings(num_requests=150, seed=1))
    settings = SimulationSettings(workers=4, page_size=PAGE, speed=1e-4)
    (report,) = simulate(requests, settings, [policy])
    fleet = TimedFleet(settings, policy)
    for request in requests:
        arrival_s = request.arrival_s / settings.speed
        fleet.advance(arrival_s)
        fleet.deliver(fleet.run.step(request._replace(arrival_s=arrival_s)))
    timeless = fleet.run.report(0.0)
    assert report.found_tokens == timeless.found_tokens > 0
    assert [load.requests for load in report.workers] == [load.requests for load in timeless.workers]


def test_more_load_means_longer_waits_and_fewer_good_requests() -> None:
    requests = generate(WorkloadSettings(num_requests=300, seed=2))
    slow, fast = (
        simulate(requests, SimulationSettings(workers=2, speed=speed, ttft_slo_s=0.3), ["round-robin"])[0].latency
        for speed in (1.0, 40.0)
    )
    assert slow is not None
    assert fast is not None
    assert fast.requests_per_s == pytest.approx(40 * slow.requests_per_s)
    assert fast.ttft_p99_s > 2 * slow.ttft_p99_s
    assert fast.goodput_per_s / fast.requests_per_s < slow.goodput_per_s / slow.requests_per_s


@given(
    st.lists(st.tuples(st.floats(0.001, 9), st.integers(1, 5)), min_size=1, max_size=30),
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5), st.floats(0, 0.2)), min_size=2, max_size=30, unique=True),
)
def test_percentiles_and_goodput_are_those_of_all_values(gaps, ended) -> None:
    latency = Latency.of([Ended(*each) for each in ended], [(np.array([s]), n) for s, n in gaps], 2.0, 0.05)
    values = sorted(s for s, n in gaps for _ in range(n))
    for found, share in ((latency.itl_p50_s, 0.5), (latency.itl_p99_s, 0.99)):
        assert sum(value <= found for value in values) >= share * len(values)
        assert sum(value < found for value in values) < share * len(values) + 1e-9
    good = sum(ttft <= 2.0 and itl <= 0.05 for _, ttft, itl in ended)
    assert math.isnan(latency.requests_per_s) == (np.ptp([arrival for arrival, _, _ in ended]) <= 1e-9)
    assert latency.goodput_per_s * len(ended) == pytest.approx(latency.requests_per_s * good, nan_ok=True)


def test_requests_that_arrive_at_once_have_no_rate() -> None:
    words = ("simulate", "--requests", 1, "--workers", 1, "--policy", "random")
    assert invoke(*words).stdout.split()[-1] == "-/-"
    assert json.loads(invoke(*words, "--json").stdout)[0]["latency"]["requests_per_s"] is None
