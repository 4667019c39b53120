"""The ledger with many events a call against a model of sets, with its own table of blocks and with a shared one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.hashes.hash_memory import HashMemory, HashNamespace
from kv_events.codec import RemovedPages, StoredPages, decode_batch, encode_batch
from kv_events.schema import AllBlocksCleared
from kv_events.streams import StreamId
from publisher.change_queue import ChangeQueue
from publisher.event_columns import PageEvents
from publisher.kernels.blocks import BlockTable
from publisher.kernels.changes import CLEARED, REMOVAL
from publisher.ledger import Ledger
from publisher.packing import pack

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


def drained(queue: ChangeQueue, pages: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the pages after the queued changes, applied batch by batch in wire order."""
    while queue.num_queued:
        changes = queue.peek(100)
        for step in decode_batch(encode_batch(STREAM, 16, 1, 0, 0.0, pack(changes), bytes(64))).steps:
            if isinstance(step, StoredPages):
                pages |= {(step.medium, name) for name in step.hashes.tolist()}
            elif isinstance(step, RemovedPages):
                gone = {(step.medium, name) for name in step.hashes.tolist()}
                assert gone <= pages
                pages -= gone
            else:
                assert step == AllBlocksCleared()
                pages = set()
        queue.take(len(changes.kinds))
        queue.confirm()
    return pages


@pytest.mark.parametrize("is_shared", [False, True])
@given(calls=calls)
def test_any_events_in_one_call_are_taken_in_their_order(is_shared: bool, calls: list[list[Event] | None]) -> None:
    queue = ChangeQueue(10_000)
    names, model = HashMemory(CAPACITY, CAPACITY), Model()
    ledger = Ledger(CAPACITY, queue, names.blocks if is_shared else BlockTable(CAPACITY))
    view: set[tuple[int, int]] = set()
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
        view = drained(queue, view)
        assert view == model.pages
