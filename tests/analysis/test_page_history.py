"""The structures of `analysis.explain` against slow reference models, on random operations."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from analysis.explain.hash_rules import WatchTable
from analysis.explain.page_history import NEVER, PageHistory, RemovalKind

NUM_PAGES = 6
WORDS = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))
PAGES = st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=NUM_PAGES, unique=True)
STEPS: st.SearchStrategy[tuple[str, list[int], int]] = st.one_of(
    st.tuples(st.sampled_from(["store", "remove"]), PAGES, st.integers(0, 3)),
    st.tuples(st.sampled_from(["clear", "begin", "abandon", "end"]), st.just([]), st.just(0)),
)


@given(st.lists(st.lists(WORDS, max_size=30), max_size=8), st.lists(WORDS, max_size=50))
def test_a_watch_table_finds_what_a_dict_finds(added: list[list[int]], column: list[int]) -> None:
    table, known, next_id = WatchTable(), dict[int, int](), 0
    for words in added:
        table.add(np.array(words, np.uint64), next_id)
        for number, word in enumerate(words):
            known.setdefault(word, next_id + number)
        next_id += len(words)
    positions, ids = table.find(np.array(column, np.uint64))
    expected = [(position, known[word]) for position, word in enumerate(column) if word in known]
    assert list(zip(positions.tolist(), ids.tolist(), strict=True)) == expected


def test_a_watch_table_grows() -> None:
    words = np.random.default_rng(1).integers(0, 2**64, 20_000, dtype=np.uint64)
    table = WatchTable()
    for start in range(0, len(words), 777):
        table.add(words[start : start + 777], start)
    positions, ids = table.find(np.concatenate((words, words + np.uint64(1))))
    assert positions.tolist() == ids.tolist() == list(range(len(words)))


@given(st.lists(STEPS, max_size=40))
def test_a_trail_holds_what_sets_hold_and_knows_the_last_change(steps: list[tuple[str, list[int], int]]) -> None:
    trail = PageHistory(NUM_PAGES)
    held: set[tuple[int, int]] = set()
    marks: set[tuple[int, int]] | None = None
    left: dict[int, tuple[int, RemovalKind]] = {}
    stored: dict[int, int] = {}
    for batch, (what, pages, medium) in enumerate(steps):
        before = {page for page, _ in held}
        leaving = RemovalKind.REMOVED
        array = np.array(pages, np.int64)
        match what:
            case "store":
                trail.store(array, medium, batch)
                held |= {(page, medium) for page in pages}
                if marks is not None:
                    marks |= {(page, medium) for page in pages}
            case "remove":
                trail.remove(array, medium, batch)
                held -= {(page, medium) for page in pages}
                if marks is not None:
                    marks -= {(page, medium) for page in pages}
            case "clear":
                trail.clear(batch)
                held, leaving = set(), RemovalKind.CLEARED
            case "begin":
                trail.begin_resync()
                marks = set()
            case "abandon":
                trail.abandon_resync()
                marks = None
            case "end":
                trail.end_resync(batch)
                held, marks, leaving = held if marks is None else held & marks, None, RemovalKind.RESYNCED
        now = {page for page, _ in held}
        left |= dict.fromkeys(before - now, (batch, leaving))
        stored |= dict.fromkeys(now - before, batch)
    for page in range(NUM_PAGES):
        assert int(trail.held[page]) == sum(1 << medium for each, medium in held if each == page)
        assert int(trail.stored[page]) == stored.get(page, NEVER)
        if page in left and not trail.held[page]:
            assert (int(trail.left[page]), trail.leaving[page]) == left[page]
