"""Scores that a router receives, and the most shared prefixes of an index."""

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from indexer.index import OverlapIndex
from indexer.scores import TierTokens, WorkerScore, stream_scores, worker_scores
from indexer.slices import run_at_once
from indexer.views import ViewState
from kv_events.codec import RemovedPages, StoredPages
from kv_events.schema import BATCHES_LOST
from tests.rigs.views import Views
from tests.support.log.records import Stream, stored

PROMPT = np.arange(1, 8, dtype=np.uint64)


def scored(*batches: tuple[Stream, list[Any]]) -> dict[str, WorkerScore]:
    views = Views(90.0)
    views.read(*(stream.batch(*events, now=100.0) for stream, events in batches))
    views.wait(10, 1)
    return scores_of(views)


def scores_of(views: Views) -> dict[str, WorkerScore]:
    (namespace,) = views.applier.namespaces
    return {found.worker: found for found in worker_scores(stream_scores(namespace, PROMPT, views.freshness))}


def pages(*numbers: int, tier: int) -> Any:
    return stored((0, list(numbers)), tier=tier)


@pytest.mark.parametrize(
    ("device", "host", "disk", "external", "expected"),
    [
        ((1, 2), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6), (7,), (8, 24, 24, 28)),
        ((1,), (3,), (2,), (), (4, 4, 12, 12)),
        ((3,), (1, 2), (), (), (0, 12, 12, 12)),
        ((), (), (1,), (), (0, 0, 4, 4)),
        ((2, 3), (), (), (), None),
    ],
)
def test_each_tier_counts_what_it_or_a_faster_one_holds(
    device: tuple[int, ...],
    host: tuple[int, ...],
    disk: tuple[int, ...],
    external: tuple[int, ...],
    expected: tuple[int, int, int, int] | None,
) -> None:
    held = [pages(*each, tier=tier) for tier, each in enumerate((device, host, disk, external)) if each]
    found = scored((Stream("w"), held))
    assert found.get("w", None) is None if expected is None else found["w"].tiers == TierTokens(*expected)


def test_a_worker_is_as_good_as_its_best_rank_on_each_tier() -> None:
    found = scored(
        (Stream("w", dp_rank=0), [pages(1, 2, tier=0)]),
        (Stream("w", dp_rank=1), [pages(1, tier=0), pages(2, 3, tier=1)]),
    )["w"]
    assert found.tiers == TierTokens(8, 12, 12, 12)
    assert found.ranks == {0: TierTokens(8, 8, 8, 8), 1: TierTokens(4, 12, 12, 12)}
    assert found.longest_matched == 12


def test_a_worker_is_as_trustworthy_as_its_worst_rank() -> None:
    lost = Stream("w", dp_rank=1)
    lost.batch(pages(9, tier=0))
    found = scored((Stream("w"), [pages(1, tier=0)]), (lost, [pages(1, tier=0)]))["w"]
    assert found.state is ViewState.STALE


def test_expired_workers_are_left_out_and_degraded_ranks_make_a_worker_stale() -> None:
    views, page = Views(100.0), pages(1, tier=0)
    degraded, rank = Stream("degraded"), Stream("sound", dp_rank=1)
    views.read(Stream("old").batch(page, now=100.0))
    views.wait(20, 1)
    views.read(degraded.batch(page, now=120.0, degraded_reason=BATCHES_LOST), Stream("sound").batch(page, now=120.0))
    views.read(rank.batch(page, now=120.0, degraded_reason=BATCHES_LOST))
    found = scores_of(views)
    assert {name: each.state for name, each in found.items()} == dict.fromkeys(("degraded", "sound"), ViewState.STALE)
    assert found["degraded"].tiers.gpu == 4
    views.read(rank.batch(now=121.0))
    assert scores_of(views)["sound"].state is ViewState.LIVE


def test_weights_give_one_number() -> None:
    found = scored((Stream("w"), [pages(1, 2, tier=0), pages(3, tier=1), pages(4, tier=3)]))["w"]
    assert found.tiers.weighted([1.0, 0.5, 0.25, 0.1]) == pytest.approx(8 + 0.5 * 4 + 0.1 * 4)


# --- shared prefixes: a model of dicts and sets -----------------------------------------------------------------------


Chain = tuple[int, ...]
"""Hashes of a prompt's pages, from the first one on."""


def store(index: OverlapIndex, stream: int, chain: Chain, first: int = 0, tier: int = 0) -> None:
    """Store the pages of a chain from page `first` on."""
    hashes = np.array(chain[first:], np.uint64)
    starts = np.zeros(-(-len(hashes) // 8), np.uint8)
    starts[0] = 1
    parent = chain[first - 1] if first else 0
    event = StoredPages(tier, hashes, hashes, starts, np.array([parent], np.uint64))
    index.store(stream, event, 0, len(hashes))


def shared(index: OverlapIndex, most: int = 1000) -> list[Chain]:
    """Return the prefixes that the index finds."""
    return [tuple(each.tolist()) for each in run_at_once(index.shared_prefixes(most))]


def expected(held: dict[int, set[int]], chains: list[Chain]) -> dict[Chain, int]:
    """Return prefix -> streams that hold its last page, for all prefixes that end somewhere.

    held: page -> streams.
    """
    children: defaultdict[int, set[int]] = defaultdict(set)
    prefixes: dict[int, Chain] = {}
    for chain in chains:
        for number, page in enumerate(chain):
            if any(not held.get(before) for before in chain[: number + 1]):
                break
            prefixes[page] = chain[: number + 1]
            if number:
                children[chain[number - 1]].add(page)
    return {
        prefix: len(held[page])
        for page, prefix in prefixes.items()
        if not any(len(held[child]) >= len(held[page]) for child in children[page])
    }


def new_chain(count: int, seed: int) -> Chain:
    """Return a chain of new pages."""
    return tuple(np.random.default_rng(seed).integers(1, 2**63, count).tolist())


def test_a_cycle_of_parents_ends_and_hides_no_other_prefix() -> None:
    index = OverlapIndex(max_pages=2**10)
    stream = index.add_stream()
    first, second, honest = *new_chain(2, 1), new_chain(3, 2)
    store(index, stream, (second, first), first=1)  # whose parent is `second`
    store(index, stream, (first, second), first=1)
    store(index, stream, honest)
    assert shared(index) == [honest]


def prompts(rng: random.Random) -> Iterator[Chain]:
    """Yield prompts, some of which begin like another one."""
    known: list[Chain] = [new_chain(6, 0)]
    yield known[0]
    for number in range(1, 12):
        head = rng.choice(known)
        known.append(head[: rng.randrange(len(head) + 1)] + new_chain(rng.randrange(1, 8), number))
        yield known[-1]


@pytest.mark.parametrize("seed", range(20))
def test_random_indexes_agree_with_the_model(seed: int) -> None:
    rng = random.Random(seed)
    index = OverlapIndex(max_pages=2**12)
    streams = [index.add_stream() for _ in range(rng.choice((2, 5, 70)))]
    chains = list(prompts(rng))
    held: defaultdict[int, set[int]] = defaultdict(set)
    for _ in range(60):
        stream, chain = rng.choice(streams), rng.choice(chains)
        first = rng.choice((0, rng.randrange(len(chain))))
        if rng.random() < 0.7:
            store(index, stream, chain, first, tier=rng.randrange(4))
            for page in chain[first:]:
                held[page].add(stream)
        else:
            gone = np.array(chain[first:], np.uint64)
            for each in range(4):
                index.remove(stream, RemovedPages(each, gone, gone), 0, len(gone))
            for page in chain[first:]:
                held[page].discard(stream)

    def worth(prefix: Chain) -> tuple[int, int]:
        return (len(held[prefix[-1]]) - 1) * len(prefix), len(prefix)

    found = shared(index)
    assert {prefix: len(held[prefix[-1]]) for prefix in found} == expected(held, chains)
    worths = [*map(worth, found)]
    assert worths == sorted(worths, reverse=True)
    assert [*map(worth, shared(index, most=2))] == worths[:2]
