"""The most shared prefixes of an index, compared with a model of dicts and sets."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from indexer.index import OverlapIndex
from kv_events.codec import RemovedPages, StoredPages
from kv_events.hashing import U64Array

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
    steps = index.shared_prefixes(most)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: list[U64Array] = end.value
            return [tuple(each.tolist()) for each in found]


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


def pages(count: int, seed: int) -> Chain:
    """Return a chain of new pages."""
    return tuple(np.random.default_rng(seed).integers(1, 2**63, count).tolist())


def test_a_prefix_ends_where_fewer_streams_hold_the_next_page() -> None:
    index = OverlapIndex(max_pages=2**10)
    streams = [index.add_stream() for _ in range(3)]
    head, tail, other = pages(4, 1), pages(3, 2), pages(9, 3)
    for stream in streams:
        store(index, stream, head)
    store(index, streams[0], head + tail, first=4)
    store(index, streams[1], head + tail, first=4, tier=2)
    store(index, streams[2], other)
    assert shared(index) == [head, head + tail, other]  # 8 pages more than once, then 7, then none
    assert shared(index, most=2) == [head, head + tail]


def test_pages_whose_beginning_no_stream_holds_are_left_out() -> None:
    index = OverlapIndex(max_pages=2**10)
    stream, chain = index.add_stream(), pages(6, 1)
    store(index, stream, chain)
    gone = np.array(chain[2:3], np.uint64)
    index.remove(stream, RemovedPages(0, gone, gone), 0, 1)
    assert shared(index) == [chain[:2]]


def test_a_cycle_of_parents_ends_and_hides_no_other_prefix() -> None:
    index = OverlapIndex(max_pages=2**10)
    stream = index.add_stream()
    first, second, honest = *pages(2, 1), pages(3, 2)
    store(index, stream, (second, first), first=1)  # whose parent is `second`
    store(index, stream, (first, second), first=1)
    store(index, stream, honest)
    assert shared(index) == [honest]


def prompts(rng: random.Random) -> Iterator[Chain]:
    """Yield prompts, some of which begin like another one."""
    known: list[Chain] = [pages(6, 0)]
    yield known[0]
    for number in range(1, 12):
        head = rng.choice(known)
        known.append(head[: rng.randrange(len(head) + 1)] + pages(rng.randrange(1, 8), number))
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
    found = shared(index)
    assert {prefix: len(held[prefix[-1]]) for prefix in found} == expected(held, chains)
    worth = [((len(held[prefix[-1]]) - 1) * len(prefix), len(prefix)) for prefix in found]
    assert worth == sorted(worth, reverse=True)
