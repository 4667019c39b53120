"""The index against a model of sets, under any order of stores, removals, sweeps, duplicates and unknown parents."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from indexer.index import IndexFullError, Marks, OverlapIndex
from indexer.slices import run_at_once
from kv_events.codec import RemovedPages, StoredPages, decode_batch
from kv_events.digest import empty_digest
from kv_events.errors import InvalidValueError
from kv_events.schema import NUM_MEDIA
from tests.support.effort import num_examples
from tests.support.log.records import Stream, digest_of, removed, stored

# a small universe of prompts: pages 1.. of eight chains that share their first pages
CHAINS = [[1, 2, 3] + [100 * c + i for i in range(1, 8)] for c in range(8)] + [[7, 8, 9, 10]]
PAGES = sorted({page for chain in CHAINS for page in chain})
TIERS = st.integers(0, 3)


def stored_pages(hashes: list[int], tier: int, parent: int = 0) -> StoredPages:
    step = decode_batch(Stream().batch(stored((parent, hashes), tier=tier)).payload).steps[0]
    assert isinstance(step, StoredPages)
    return step


def removed_pages(hashes: list[int], tier: int) -> RemovedPages:
    step = decode_batch(Stream().batch(removed(hashes, tier=tier)).payload).steps[0]
    assert isinstance(step, RemovedPages)
    return step


def prefix_held(held: set[tuple[int, int]], prompt: list[int], slowest: int) -> int:
    """Count the leading pages held on tier `slowest` or a faster one, one by one."""
    for i, page in enumerate(prompt):
        if not any((page, tier) in held for tier in range(slowest + 1)):
            return i
    return len(prompt)


def copied(index: OverlapIndex) -> OverlapIndex:
    """Return a copy of the index, made through an image."""
    copy = OverlapIndex(max_pages=1000)
    copy.restore(run_at_once(index.image()))
    return copy


class IndexMachine(RuleBasedStateMachine):
    """Applies every change to the index and to one set of (page, tier) for each stream."""

    @initialize(num_streams=st.sampled_from([1, 3, 70]))
    def begin(self, num_streams: int) -> None:
        self.index = OverlapIndex(max_pages=1000)
        self.held: dict[int, set[tuple[int, int]]] = {self.index.add_stream(): set() for _ in range(num_streams)}
        self.marks: dict[int, tuple[Marks, set[tuple[int, int]]]] = {}

    def stream(self, pick: int) -> int:
        return sorted(self.held)[pick % len(self.held)]

    @rule(pick=st.integers(0, 100), hashes=st.sampled_from(CHAINS), start=st.integers(0, 5), tier=TIERS)
    def store_a_chain(self, pick: int, hashes: list[int], start: int, tier: int) -> None:
        start %= len(hashes)
        self.store(self.stream(pick), hashes[start:], tier, hashes[start - 1] if start else 0)

    @rule(pick=st.integers(0, 100), hashes=st.lists(st.sampled_from(PAGES), min_size=1, max_size=12), tier=TIERS)
    def store_pages_in_any_order(self, pick: int, hashes: list[int], tier: int) -> None:
        self.store(self.stream(pick), hashes, tier, 999_999)

    def store(self, stream: int, hashes: list[int], tier: int, parent: int) -> None:
        marks, named = self.marks.get(stream, (None, set()))
        known, refused = self.index.store(stream, stored_pages(hashes, tier, parent), 0, len(hashes), marks)
        new = {(page, tier) for page in hashes} - self.held[stream]
        assert (known, refused) == (len(hashes) - len(new), 0)
        self.held[stream] |= new
        named |= {(page, tier) for page in hashes}

    @rule(pick=st.integers(0, 100), hashes=st.lists(st.sampled_from(PAGES), max_size=12), tier=TIERS)
    def remove(self, pick: int, hashes: list[int], tier: int) -> None:
        stream = self.stream(pick)
        marks, named = self.marks.get(stream, (None, set()))
        unknown, refused = self.index.remove(stream, removed_pages(hashes, tier), 0, len(hashes), marks)
        gone = {(page, tier) for page in hashes} & self.held[stream]
        assert (unknown, refused) == (len(hashes) - len(gone), 0)
        self.held[stream] -= gone
        named -= {(page, tier) for page in hashes}

    @rule(pick=st.integers(0, 100))
    def clear_a_stream(self, pick: int) -> None:
        stream = self.stream(pick)
        assert sum(self.index.sweep(stream)) == len(self.held[stream])
        self.held[stream] = set()

    @rule(pick=st.integers(0, 100))
    def begin_to_mark(self, pick: int) -> None:
        self.marks[self.stream(pick)] = (self.index.new_marks(), set())

    @rule(pick=st.integers(0, 100))
    def sweep_what_is_not_marked(self, pick: int) -> None:
        stream = self.stream(pick)
        if stream in self.marks:
            marks, named = self.marks.pop(stream)
            assert sum(self.index.sweep(stream, marks)) == len(self.held[stream] - named)
            self.held[stream] &= named

    @rule(pick=st.integers(0, 100))
    def replace_a_stream(self, pick: int) -> None:
        stream = self.stream(pick)
        if not self.held[stream] and stream not in self.marks:
            self.index.drop_stream(stream)
            assert self.index.add_stream() == stream

    @rule()
    def go_through_an_image(self) -> None:
        if not self.marks:
            self.index = copied(self.index)

    @rule(prompt=st.sampled_from(CHAINS), length=st.integers(0, 11), stray=st.booleans())
    def find_a_prompt(self, prompt: list[int], length: int, stray: bool) -> None:
        prompt = prompt[:length] + ([123_456] if stray else [])
        matches = self.index.find(np.array(prompt, np.uint64))
        found = {s: matches.pages[s].tolist() for s in matches.streams.tolist()}
        expected = {s: [prefix_held(held, prompt, tier) for tier in range(4)] for s, held in self.held.items()}
        assert found == {s: tiers for s, tiers in expected.items() if tiers[3]}
        assert list(found) == sorted(found)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        assert self.index.num_pages == len({page for held in self.held.values() for page, _ in held})
        for stream, held in self.held.items():
            assert self.index.digest(stream).tobytes() == digest_of(held)

    def teardown(self) -> None:
        for stream, held in getattr(self, "held", {}).items():
            found = {
                (int(page), tier)
                for part in self.index.stream_pages(stream)
                for page, mask in zip(part.hashes, part.tiers, strict=True)
                for tier in range(4)
                if mask >> tier & 1
            }
            assert found == held


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=num_examples(60), stateful_step_count=40)


@settings(max_examples=num_examples(20))
@given(st.integers(0, 2**32), st.integers(1, 200))
def test_large_random_views_equal_the_model(seed: int, num_streams: int) -> None:
    random = np.random.default_rng(seed)
    prompts = random.integers(1, 2**64, (20, 300), dtype=np.uint64)
    index, held = OverlapIndex(max_pages=10_000), dict[int, Any]()
    for _ in range(num_streams):
        stream = index.add_stream()
        held[stream] = set()
        for _ in range(3):
            prompt, tier = prompts[random.integers(20)], int(random.integers(4))
            begin, end = sorted(random.integers(0, 301, 2).tolist())
            part = prompt[begin:end].tolist()
            if part:
                index.store(stream, stored_pages(part, tier), 0, len(part))
                held[stream] |= {(page, tier) for page in part}
    index.check()
    for prompt in prompts:
        matches = index.find(prompt)
        for stream in held:
            expected = [prefix_held(held[stream], prompt.tolist(), tier) for tier in range(4)]
            is_found = stream in matches.streams.tolist()
            assert is_found == (expected[3] > 0)
            assert not is_found or matches.pages[stream].tolist() == expected


def test_pages_beyond_the_bound_are_refused_counted_and_harmless() -> None:
    index = OverlapIndex(max_pages=10)
    stream = index.add_stream()
    assert index.store(stream, stored_pages(list(range(1, 16)), 0), 0, 15) == (0, 5)
    assert index.store(stream, stored_pages(list(range(1, 16)), 1), 0, 15) == (0, 5)
    assert index.remove(stream, removed_pages([1, 2, 15], 0), 0, 3) == (1, 0)
    assert index.find(np.arange(1, 16, dtype=np.uint64)).pages[stream].tolist() == [0, 10, 10, 10]
    index.check()


def test_streams_beyond_the_bound_are_refused_and_one_that_holds_pages_cannot_be_dropped() -> None:
    index = OverlapIndex(max_pages=10, max_streams=2)
    stream = index.add_stream()
    index.add_stream()
    with pytest.raises(IndexFullError, match="at most 2 worker streams"):
        index.add_stream()
    index.store(stream, stored_pages([1], 0), 0, 1)
    with pytest.raises(InvalidValueError, match="stream: got 0"):
        index.drop_stream(stream)


def scattered(max_pages: int, **bounds: int) -> tuple[OverlapIndex, dict[int, int], list[int]]:
    """Return an index in which 64 streams hold random pages, the pages that each of them holds, and the prompt."""
    random = np.random.default_rng(1)
    index, prompt = OverlapIndex(max_pages, **bounds), list(range(1, max_pages + 1))
    held = {}
    for _ in range(64):
        stream = index.add_stream()
        part = [page for page in prompt if page == 1 or random.random() < 0.1]
        index.store(stream, stored_pages(part, 0), 0, len(part))
        held[stream] = int(index.digest(stream)[0])
    return index, held, prompt


def test_room_for_another_stream_is_made_in_short_slices_between_which_queries_are_answered() -> None:
    index, held, _ = scattered(20_000)
    first = np.ones(1, np.uint64)
    num_slices = 0
    for _ in index.make_room():
        assert index.find(first).streams.tolist() == list(range(64))
        num_slices += 1
    assert num_slices >= 8
    assert list(index.make_room()) == []
    stream = index.add_stream()
    assert stream == 64
    index.store(stream, stored_pages([1], 0), 0, 1)
    assert index.find(first).streams.tolist() == list(range(65))
    assert {s: int(index.digest(s)[0]) for s in held} == held
    index.check()


def test_another_stream_has_room_if_wider_holder_sets_exceed_their_bound() -> None:
    index, held, prompt = scattered(300, max_set_bytes=250 * 32)
    assert index.num_sets > 125  # the bound for sets of 64 bytes
    stream = index.add_stream()
    assert index.store(stream, stored_pages([2, 3], 0), 0, 2) == (0, 2)
    index.check()
    removed_all = removed_pages(prompt, 0)
    for old in held:
        index.remove(old, removed_all, 0, len(prompt))
        index.check()
    for old in held:  # removals that need a set of their own are refused until there is room
        index.remove(old, removed_all, 0, len(prompt))
    index.check()
    assert (index.num_pages, index.num_sets) == (0, 0)
    assert index.store(stream, stored_pages([2, 3], 0), 0, 2) == (0, 0)


def test_there_is_no_room_to_make_while_a_number_of_a_stream_is_free() -> None:
    index, _, _ = scattered(10)
    assert sum(index.sweep(7)) > 0
    index.drop_stream(7)
    assert list(index.make_room()) == []
    assert index.add_stream() == 7
    assert index.most_streams == 64


def test_all_workers_on_the_same_pages_cost_no_more_than_one() -> None:
    alone, shared = OverlapIndex(max_pages=200_000), OverlapIndex(max_pages=200_000)
    pages = stored_pages(list(range(1, 30_001)), 0)
    for index, num_streams in ((alone, 1), (shared, 64)):
        for _ in range(num_streams):
            index.store(index.add_stream(), pages, 0, 30_000)
    assert shared.bytes_used <= alone.bytes_used * 1.01
    assert shared.num_sets == 1


def test_holder_sets_are_bounded_and_removals_continue_when_stores_are_refused() -> None:
    index = OverlapIndex(max_pages=2000, max_set_bytes=64 * 32)  # 64 sets of 32 bytes
    streams = [index.add_stream() for _ in range(8)]
    held: dict[int, set[tuple[int, int]]] = {stream: set() for stream in streams}
    random = np.random.default_rng(0)
    num_refused = 0
    for page in range(1, 200):
        for stream in streams:
            if random.random() < 0.5:
                _, refused = index.store(stream, stored_pages([page], 0), 0, 1)
                num_refused += refused
                held[stream] |= set() if refused else {(page, 0)}
    index.check()
    assert num_refused > 0
    assert index.num_sets <= 63
    assert not index.has_room
    for stream in streams:
        assert index.digest(stream).tobytes() == digest_of(held[stream])
        assert sum(index.sweep(stream)) == len(held[stream])
        index.check()
    assert (index.num_pages, index.num_sets) == (0, 0)


@pytest.mark.parametrize("holder", [1, 3, 63, 64, 130])
def test_an_image_whose_pages_are_held_by_an_unknown_stream_is_refused(holder: int) -> None:
    index = OverlapIndex(max_pages=1000)
    for stream in range(65 if holder >= 64 else 1):
        assert index.add_stream() == stream
    index.store(0, stored_pages([1, 2], 0), 0, 2)
    image = run_at_once(index.image())
    sets = np.concatenate(image.sets)
    width = sets.shape[1] // NUM_MEDIA
    if holder >= 64 * width:
        image.digests[holder] = empty_digest()
    elif holder == 64:
        del image.digests[64]
    sets[-1, min(holder // 64, width - 1)] |= np.uint64(1 << holder % 64)
    with pytest.raises(InvalidValueError, match=r"image\.(sets|digests)"):
        OverlapIndex(max_pages=1000).restore(image._replace(sets=[sets]))


@pytest.mark.parametrize(
    ("column", "change"),
    [("holders", lambda holders: holders + 1), ("parents", lambda parents: parents[:-1])],
)
def test_an_image_with_wrong_columns_is_refused(column: str, change: Callable[[Any], Any]) -> None:
    index = OverlapIndex(max_pages=1000)
    index.store(index.add_stream(), stored_pages([1, 2], 0), 0, 2)
    image = run_at_once(index.image())
    wrong = [change(np.concatenate(getattr(image, column)))]
    whole = {name: [np.concatenate(getattr(image, name))] for name in ("hashes", "parents", "holders")}
    with pytest.raises(InvalidValueError, match="image"):
        OverlapIndex(max_pages=1000).restore(image._replace(**(whole | {column: wrong})))


def test_an_image_that_does_not_fit_is_refused() -> None:
    index = OverlapIndex(max_pages=2000)
    stream = index.add_stream()
    index.store(stream, stored_pages(list(range(1, 1501)), 0), 0, 1500)
    with pytest.raises(InvalidValueError, match="image"):
        copied(index)
