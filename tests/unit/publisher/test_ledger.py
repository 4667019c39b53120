"""Copies of a `Ledger` that are made in slices while it changes, compared with the set of its pages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from publisher.change_queue import ChangeQueue
from publisher.event_columns import PageEvents
from publisher.kernels.blocks import BlockTable
from publisher.ledger import SLICE_PAGES, Ledger, LedgerCopy

NUM_PAGES = 3 * SLICE_PAGES + 5


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(2 * NUM_PAGES, ChangeQueue(10), BlockTable(2 * NUM_PAGES))
    store(ledger, range(NUM_PAGES))
    return ledger


def store(ledger: Ledger, names: Iterable[int]) -> None:
    """Store root pages on the first medium. Their sequence hashes equal their block hashes."""
    words = np.array([*names], np.uint64)
    num_pages = len(words)
    lengths = np.ones(num_pages, np.int64)
    columns = PageEvents(words, words, lengths, np.zeros(num_pages, np.uint64), np.zeros(num_pages, np.uint8))
    ledger.change(columns.stored_on(0), None)


def remove(ledger: Ledger, names: Iterable[int]) -> None:
    ledger.change(PageEvents.removed(np.array([*names], np.uint64), 0), None)


def pages_of(held: LedgerCopy) -> list[int]:
    return sorted(held.hashes[held.media == 1].tolist())


def copy_slices(ledger: Ledger, held: LedgerCopy, numbers: Iterable[int]) -> None:
    for number in numbers:
        ledger.copy_slice(number, held)


def test_a_copy_of_a_ledger_that_stands_still_needs_each_slice_once(ledger: Ledger) -> None:
    held = ledger.start_copy()
    assert ledger.stale_slices() == [0, 1, 2, 3]
    copy_slices(ledger, held, ledger.stale_slices())
    assert ledger.stale_slices() == []
    held = ledger.finish_copy(held)
    assert pages_of(held) == [*range(NUM_PAGES)]
    assert held.digest.tolist() == ledger.digest().tolist()


def test_slices_that_changed_are_copied_again_at_the_end(ledger: Ledger) -> None:
    held = ledger.start_copy()
    copy_slices(ledger, held, ledger.stale_slices())
    remove(ledger, [0, SLICE_PAGES])
    assert ledger.stale_slices() == [0, 1]
    store(ledger, [NUM_PAGES, NUM_PAGES + 1])
    assert pages_of(ledger.finish_copy(held)) == [*range(1, SLICE_PAGES), *range(SLICE_PAGES + 1, NUM_PAGES + 2)]


def test_a_page_on_a_further_medium_makes_its_slice_stale(ledger: Ledger) -> None:
    held = ledger.start_copy()
    copy_slices(ledger, held, ledger.stale_slices())
    one = np.array([7], np.uint64)
    no_parent = np.zeros(1, np.uint64), np.zeros(1, np.uint8)
    ledger.change(PageEvents(one, one, np.ones(1, np.int64), *no_parent).stored_on(2), None)
    assert ledger.stale_slices() == [0]
    held = ledger.finish_copy(held)
    assert held.hashes[held.media == 0b101].tolist() == [7]


@pytest.mark.parametrize("num_slices", [0, 2, 4])
def test_a_clear_during_a_copy_leaves_only_what_came_after_it(ledger: Ledger, num_slices: int) -> None:
    held = ledger.start_copy()
    copy_slices(ledger, held, range(num_slices))
    ledger.clear()
    store(ledger, range(50, 60))
    assert pages_of(ledger.finish_copy(held)) == [*range(50, 60)]
    ledger.check()


def test_after_a_clear_the_ledger_holds_what_is_stored_again_and_nothing_else(ledger: Ledger) -> None:
    remove(ledger, range(0, NUM_PAGES, 3))
    ledger.clear()
    store(ledger, range(1, NUM_PAGES, 2))
    ledger.check()
    assert pages_of(ledger.finish_copy(ledger.start_copy())) == [*range(1, NUM_PAGES, 2)]
    remove(ledger, range(NUM_PAGES))
    ledger.check()
    assert ledger.num_pages == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_equals_the_ledger_during_any_change(ledger: Ledger, seed: int) -> None:
    random = np.random.default_rng(seed)
    model = set(range(NUM_PAGES))
    held = ledger.start_copy()
    for _ in range(3):
        for number in ledger.stale_slices():
            ledger.copy_slice(number, held)
            gone, come = random.integers(0, 2 * NUM_PAGES, (2, 100)).tolist()
            remove(ledger, gone)
            store(ledger, come)
            model = (model - set(gone)) | set(come)
    assert pages_of(ledger.finish_copy(held)) == sorted(model)
    ledger.check()
