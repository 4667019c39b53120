"""The ledger: many events a call against a model of sets, and copies that are made in slices while it changes."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.hashes.hash_memory import HashMemory, HashNamespace
from kv_events.codec import decode_batch, encode_batch
from kv_events.streams import StreamId
from publisher.change_queue import ChangeQueue
from publisher.event_columns import PageEvents
from publisher.kernels.blocks import BlockTable
from publisher.kernels.changes import CLEARED, REMOVAL
from publisher.ledger import SLICE_PAGES, Ledger, LedgerCopy
from publisher.packing import pack
from tests.models.stream_reader import StreamReader

CAPACITY = 300
STREAM = StreamId("m", "t", "w", 0)
SPACE = HashNamespace(None, 1, np.uint64(0))


class Event(NamedTuple):
    """Blocks that are stored or removed, or an event of an unknown kind that must be ignored."""

    kind: int
    blocks: list[int]


def name_of(block: int) -> int:
    """Sequence hash of a block. Two blocks share each page."""
    return (block // 2 + 1) * 0x9E37_79B9_7F4A_7C15 % 2**64


block = st.integers(0, 200)
in_a_row = st.builds(
    lambda first, length, step: [(first + step * i) % 201 for i in range(length)],
    block,
    st.sampled_from([0, 1, 63, 64, 65, 130]),
    st.sampled_from([1, -1]),
)
kind = st.sampled_from([0, 1, 2, 3, REMOVAL, REMOVAL, REMOVAL + 1, REMOVAL + 2, REMOVAL + 3, CLEARED + 1])
event = st.builds(Event, kind, in_a_row | st.lists(block, max_size=5))
calls = st.lists(st.lists(event, max_size=12) | st.none(), max_size=12)


class Model:
    """A model of blocks by medium."""

    def __init__(self) -> None:
        self.held: set[tuple[int, int]] = set()

    @property
    def pages(self) -> set[tuple[int, int]]:
        return {(medium, name_of(block)) for medium, block in self.held}

    def take(self, event: Event) -> None:
        if event.kind < REMOVAL:
            self.held |= {(event.kind, block) for block in event.blocks}
        elif event.kind < CLEARED:
            self.held -= {(event.kind - REMOVAL, block) for block in event.blocks}


def columns(events: list[Event]) -> PageEvents:
    blocks = [block for event in events for block in event.blocks]
    names = np.array([name_of(block) for block in blocks], np.uint64)
    lengths, nothing = np.array([len(event.blocks) for event in events], np.int64), np.zeros(len(events), np.uint64)
    kinds = np.array([event.kind for event in events], np.uint8)
    return PageEvents(np.array(blocks, np.uint64), names, lengths, nothing, nothing.astype(np.uint8), kinds)


def drained(queue: ChangeQueue, reader: StreamReader) -> set[tuple[int, int]]:
    """Return the pages after the queued changes, applied batch by batch in wire order."""
    while queue.num_queued:
        changes = queue.peek(100)
        reader.apply(decode_batch(encode_batch(STREAM, 16, 1, 0, 0.0, pack(changes), bytes(64))).steps)
        queue.take(len(changes.kinds))
        queue.confirm()
    return reader.pages


@pytest.mark.parametrize("is_shared", [False, True])
@given(calls=calls)
def test_any_events_in_one_call_are_taken_in_their_order(is_shared: bool, calls: list[list[Event] | None]) -> None:
    queue = ChangeQueue(10_000)
    names, model = HashMemory(CAPACITY, CAPACITY), Model()
    ledger = Ledger(CAPACITY, queue, names.blocks if is_shared else BlockTable(CAPACITY))
    reader = StreamReader(is_strict=True)
    for events in calls:
        if events is None:
            ledger.clear()
            model.held.clear()
        else:
            blocks = np.array([block for each in events if each.kind < REMOVAL for block in each.blocks], np.uint64)
            named = np.array([name_of(int(block)) for block in blocks], np.uint64)
            names.remember(blocks, named, 0, 0, SPACE)
            ledger.change(columns(events), None)
            for each in events:
                model.take(each)
        ledger.check()
        assert ledger.num_pages == len({name for _, name in model.pages})
        assert drained(queue, reader) == model.pages


# --- copies ---------------------------------------------------------------------------------------------------------

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
