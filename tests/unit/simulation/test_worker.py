"""One simulated engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine_cache import MatchPrefixParams, RadixKey
from kv_events.schema import StorageMedium
from simulation import Request, SimulatedWorker
from simulation.direct import DirectFleet
from tests.models.cache_checks import check_cache

NO_ROWS = np.zeros(0, np.int64)


def _worker(make_fleet: Callable[..., DirectFleet], **changes: int) -> SimulatedWorker:
    return make_fleet(workers=1, **changes).trial.workers[0]


def test_what_was_served_is_found_again(make_fleet, prompts) -> None:
    worker = _worker(make_fleet)
    request = prompts.request(100)
    assert worker.serve(request).found_tokens == 0
    assert worker.serve(request).found_tokens == 96


def test_an_output_is_found_by_the_next_turn(make_fleet, prompts) -> None:
    worker = _worker(make_fleet)
    first = Request(0.0, prompts.tokens(40), prompts.tokens(40))
    worker.serve(first)
    following = np.concatenate((first.token_ids, first.output_tokens, prompts.tokens(30)))
    assert worker.serve(Request(1.0, following)).found_tokens == 80


def test_an_extra_key_keeps_prompts_apart(make_fleet, prompts) -> None:
    worker = _worker(make_fleet)
    request = prompts.request(64)
    worker.serve(request)
    assert worker.serve(request._replace(extra_key="tenant")).found_tokens == 0
    assert worker.serve(request._replace(extra_key="tenant")).found_tokens == 64


def test_found_tokens_are_the_longest_shared_prefix_in_whole_pages(make_fleet, prompts) -> None:
    worker = _worker(make_fleet, capacity_tokens=2**16)
    served: list[np.ndarray] = []
    for _ in range(60):
        old = served[prompts.random.integers(len(served))] if served else prompts.tokens(0)
        kept = old[: prompts.random.integers(len(old) + 1)]
        request = Request(0.0, np.concatenate((kept, prompts.tokens(20))), prompts.tokens(prompts.random.integers(40)))
        expected = max((_shared(request.token_ids, other) // 16 * 16 for other in served), default=0)
        assert worker.serve(request).found_tokens == expected
        served.append(np.concatenate((request.token_ids, request.output_tokens)))


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    length = 0
    for a, b in zip(one.tolist(), other.tolist(), strict=False):
        if a != b:
            break
        length += 1
    return length


def test_every_page_is_free_or_in_the_tree_after_every_request(make_fleet, prompts) -> None:
    worker = _worker(make_fleet)
    requests = [
        Request(0.0, prompts.tokens(n), prompts.tokens(m)) for n, m in ((300, 50), (10, 0), (900, 500), (16, 16))
    ]
    for i in prompts.random.integers(len(requests), size=40):
        worker.serve(requests[i])
        check_cache(worker.cache, NO_ROWS)


def test_a_request_beyond_the_capacity_keeps_its_beginning(make_fleet, prompts) -> None:
    worker = _worker(make_fleet)
    request = prompts.request(3000)
    assert worker.serve(request).is_cut
    held = worker.cache.match_prefix(MatchPrefixParams(RadixKey(request.token_ids)))
    assert len(held.device_indices) == 1024
    assert worker.serve(request).found_tokens == 1024


def test_a_request_that_fits_is_not_cut_even_if_all_else_has_to_go(make_fleet, prompts) -> None:
    worker = _worker(make_fleet)
    worker.serve(prompts.request(1000))
    assert not worker.serve(prompts.request(1024)).is_cut


def test_a_prompt_shorter_than_a_page_leaves_no_trace(make_fleet, prompts) -> None:
    worker = _worker(make_fleet)
    assert worker.serve(prompts.request(15)) == (0, False)
    assert list(worker.cache.iter_resident(StorageMedium.GPU)) == []


def test_the_ledger_holds_what_the_cache_holds(make_fleet, prompts) -> None:
    worker = _worker(make_fleet)
    for _ in range(10):
        worker.serve(prompts.request(200))
    held = worker.publisher.stats().pages["held"]
    assert held == sum(1 for _ in worker.cache.iter_resident(StorageMedium.GPU)) > 0
