"""Ledger, digest, wire events and resyncs against models of dicts and sets, in random order."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events.codec import StoredPages
from kv_events.schema import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent
from publisher import EventPublisher, OutRecord
from publisher.kernels.changes import SPAN
from tests.models.stream_reader import MASK64, StreamReader
from tests.rigs.publisher import make_publisher, steps_of
from tests.support.effort import num_examples
from tests.support.log.records import words

NAMESPACES = (None, "tenant-a")


def name_of(block: int, extra_key: str | None) -> int:
    """Sequence hash of a page in these tests. Blocks 8 and 9 carry the pages of blocks 0 and 1."""
    return ((block & MASK64) % 8 + 1) * (3 if extra_key else 1) * 0x9E37_79B9_7F4A_7C15 & MASK64


block = st.integers(0, 9).map(lambda i: i - 2**63 if i % 2 else i)
medium = st.sampled_from([None, *MEDIA])
namespace = st.sampled_from(NAMESPACES)


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    hashes = draw(st.lists(block, min_size=1, max_size=5))
    extra_key = draw(namespace)
    names = [name_of(h, extra_key) for h in hashes]
    parent = draw(st.none() | block)
    return BlockStored(hashes, parent, [], 4, None, draw(medium), extra_key, words(names))


removed = st.builds(BlockRemoved, st.lists(block, min_size=1, max_size=4), medium, namespace)
event = st.one_of(stored(), stored(), removed, removed, st.just(AllBlocksCleared()))
calls = st.lists(st.lists(event, max_size=6), max_size=25)


class Model:
    """A model of blocks by medium, and of their pages."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, str | None, int], int] = {}

    def apply(self, event: EngineEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            return
        tier = 0 if event.medium is None else MEDIA.index(event.medium)
        for block in event.block_hashes:
            key = (block & MASK64, event.extra_key, tier)
            if isinstance(event, BlockStored):
                self.blocks[key] = name_of(block, event.extra_key)
            else:
                self.blocks.pop(key, None)

    @property
    def pages(self) -> set[tuple[int, int]]:
        return {(tier, name) for (_, _, tier), name in self.blocks.items()}


def make(**settings: Any) -> EventPublisher:
    return make_publisher(**{"ledger_pages": 64, "queue_pages": 10_000, "resync_jitter_s": 0.5, **settings})


@settings(max_examples=num_examples(150))
@given(
    calls,
    st.integers(1, 7) | st.just(1000),
    st.integers(1, 12) | st.just(10_000),
    st.sampled_from([1, 2, 3, 1000]),
    st.sampled_from([0, 2**28 - 3, 2**32 - 3]),
)
def test_a_reader_of_the_stream_knows_what_the_events_state(
    calls: list[list[EngineEvent]], batch_pages: int, queue_pages: int, period: int, first_span: int
) -> None:
    """period: calls between readings. With 1000, the first resync alone restores everything."""
    publisher = make(batch_pages=batch_pages, queue_pages=queue_pages)
    model, view = Model(), StreamReader(is_strict=True)
    publisher._tracker.queue.arrays.cursors[SPAN] = first_span  # close to the wrap-around of the counter
    for number, events in enumerate(calls, 1):
        publisher.publish(events)
        for event in events:
            model.apply(event)
        publisher.check()
        if number % period == 0:
            view.read_all(publisher.take_records(float(number), force=True))
            assert view.pages == model.pages
    view.read_all(publisher.take_records(1000.0, force=True))
    assert view.pages == model.pages
    assert period < 1000 or len(view.resyncs) == 1
    assert publisher.stats().rejected_events == {}


@given(calls, st.integers(1, 4))
def test_a_full_ledger_and_its_reader_agree(calls: list[list[EngineEvent]], ledger_pages: int) -> None:
    publisher, view = make(ledger_pages=ledger_pages), StreamReader(is_strict=True)
    for events in calls:
        publisher.publish(events)
        publisher.check()
        view.read_all(publisher.take_records(1000.0, force=True))
        assert len({name for _, name in view.pages}) == publisher.stats().pages["held"]
        assert publisher.stats().pages["held"] <= ledger_pages


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.sampled_from(range(4))), max_size=12
)


@given(prompts, st.data())
def test_a_resync_names_parents_before_children_on_every_tier(
    prompts: list[tuple[list[int], int]], data: st.DataObject
) -> None:
    publisher = make(batch_pages=3)
    parent_of = dict[int, int]()
    tiers_of = [set[int]() for _ in MEDIA]
    for prompt, tier in prompts:
        names = [int("1" + "".join(map(str, prompt[: i + 1]))) for i in range(len(prompt))]
        publisher.publish([BlockStored(names, None, [], 4, None, MEDIA[tier], None, words(names))])
        parent_of.update(zip(names, [0, *names[:-1]], strict=True))
        tiers_of[tier].update(names)
    for tier, held in enumerate(tiers_of):
        gone = data.draw(st.sets(st.sampled_from(sorted(held)))) if held else set()
        publisher.publish([BlockRemoved(sorted(gone), MEDIA[tier])])
        held -= gone
    named = [set[int]() for _ in MEDIA]
    for tier, name, parent in pages_of(publisher.take_records(1000.0, force=True)):
        assert parent == parent_of[name]
        assert parent in named[tier] or parent not in tiers_of[tier]
        named[tier].add(name)
    assert named == tiers_of


def pages_of(records: list[OutRecord]) -> list[tuple[int, int, int]]:
    """Return (tier, sequence hash, sequence hash of the parent) of every stored page, in order."""
    pages = []
    for step in steps_of(records):
        if isinstance(step, StoredPages):
            begins = np.unpackbits(step.chain_starts, count=len(step.hashes), bitorder="little")
            chains, previous = iter(step.parents.tolist()), 0
            for begin, name in zip(begins, step.hashes.tolist(), strict=True):
                pages.append((step.medium, name, next(chains) if begin else previous))
                previous = name
    return pages
