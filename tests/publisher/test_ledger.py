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
from publisher.kernels.blocks import BlockTable
from publisher.kernels.changes import CLEARED, REMOVAL
from publisher.kernels.events import PageEvents
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


def store(ledger: Ledger, names: Iterable[int], tier: int = 0) -> None:
    """Store root pages. Their sequence hashes equal their block hashes."""
    words = np.array([*names], np.uint64)
    num_pages = len(words)
    lengths = np.ones(num_pages, np.int64)
    columns = PageEvents(words, words, lengths, np.zeros(num_pages, np.uint64), np.zeros(num_pages, np.uint8))
    ledger.change(columns.stored_on(tier), None)


def pages_of(held: LedgerCopy) -> set[tuple[int, int]]:
    rows = zip(held.hashes.tolist(), held.media.tolist(), strict=True)
    return {(tier, name) for name, media in rows for tier in range(4) if media >> tier & 1}


def test_a_copy_of_a_ledger_that_stands_still_needs_each_slice_once(ledger: Ledger) -> None:
    held = ledger.start_copy()
    assert ledger.stale_slices() == [0, 1, 2, 3]
    for number in range(4):
        ledger.copy_slice(number, held)
    assert ledger.stale_slices() == []
    held = ledger.finish_copy(held)
    assert pages_of(held) == {(0, name) for name in range(NUM_PAGES)}
    assert held.digest.tolist() == ledger.digest().tolist()


@pytest.mark.parametrize("num_changed", [1, 100])
@pytest.mark.parametrize("seed", range(6))
def test_a_copy_equals_the_ledger_whatever_changes_meanwhile(ledger: Ledger, num_changed: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    model = {(0, name) for name in range(NUM_PAGES)}
    held = ledger.start_copy()
    for _ in range(3):
        for number in ledger.stale_slices():
            ledger.copy_slice(number, held)
            if random.random() < 0.1:
                ledger.clear()
                model.clear()
            tier = int(random.choice([0, 2]))
            gone, come = random.integers(0, 2 * NUM_PAGES, (2, num_changed)).tolist()
            ledger.change(PageEvents.removed(np.array(gone, np.uint64), tier), None)
            store(ledger, come, tier)
            model = (model - {(tier, name) for name in gone}) | {(tier, name) for name in come}
    assert pages_of(ledger.finish_copy(held)) == model
    ledger.check()
