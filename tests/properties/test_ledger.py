"""Ledger, digest, wire events and resyncs against models of dicts and sets, in random order."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_events.codec import RemovedPages, StoredPages, decode_batch
from kv_events.log.memory import MemoryLog
from kv_events.schema import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    SnapshotBegin,
    SnapshotEnd,
)
from publisher import EventPublisher, PublisherSettings
from publisher.kernels.changes import SPAN
from publisher.sinks import MemorySink, OutRecord
from tests.support.log.records import words

MASK64 = 2**64 - 1
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


class View:
    """A model of a reader. Checks the digest of every batch and the structure of resyncs."""

    def __init__(self) -> None:
        self.pages: set[tuple[int, int]] = set()
        self.named: set[tuple[int, int]] | None = None
        self.next_seq = 0
        self.num_resyncs = 0

    def read(self, records: list[OutRecord]) -> None:
        for record in records:
            batch = decode_batch(record.payload)
            assert batch.seq == self.next_seq
            self.next_seq += 1
            for step in batch.steps:
                self.apply(step)
            if self.named is None:
                assert batch.digest.tolist() == digest_of(self.pages)

    def apply(self, step: object) -> None:
        match step:
            case StoredPages():
                tiers = [(step.medium, name) for name in step.hashes.tolist()]
                assert not (self.named is None and self.pages & set(tiers)), "stored what was known"
                self.pages.update(tiers)
                if self.named is not None:
                    self.named.update(tiers)
            case RemovedPages():
                self.pages.difference_update((step.medium, name) for name in step.hashes.tolist())
            case AllBlocksCleared():
                self.pages.clear()
            case SnapshotBegin():
                assert self.named is None
                self.named = set()
            case SnapshotEnd():
                assert self.named is not None
                self.pages, self.named = self.named, None
                self.num_resyncs += 1


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def digest_of(pages: set[tuple[int, int]]) -> list[int]:
    words = [0] * 8
    for tier, name in pages:
        words[tier] += 1
        words[tier + 4] ^= mix(name)
    return words


def make(**settings: Any) -> EventPublisher:
    values = {
        "model": "m",
        "worker": "w",
        "block_size": 4,
        "ledger_pages": 64,
        "queue_pages": 10_000,
        **settings,
    }
    return EventPublisher(PublisherSettings(**values), MemorySink(MemoryLog()))


@given(calls, st.integers(1, 7) | st.just(1000), st.sampled_from([0, 2**28 - 3, 2**32 - 3]))
def test_a_reader_of_the_stream_knows_what_the_events_state(
    calls: list[list[EngineEvent]], batch_pages: int, first_span: int
) -> None:
    publisher, model, view = make(batch_pages=batch_pages), Model(), View()
    publisher._tracker._change_queue.arrays.cursors[SPAN] = first_span  # close to the wrap-around of the counter
    now = 1000.0
    for events in calls:
        publisher.publish(events)
        for event in events:
            model.apply(event)
        publisher.check()
        if len(events) % 2:
            view.read(publisher.take_records(now, force=True))
            assert view.pages == model.pages
    view.read(publisher.take_records(now, force=True))
    assert view.pages == model.pages
    assert publisher.stats().rejected_events == {}


@given(calls, st.integers(1, 12))
def test_a_reader_is_right_again_after_every_overflow(calls: list[list[EngineEvent]], queue_pages: int) -> None:
    publisher, model, view = make(queue_pages=queue_pages, batch_pages=3), Model(), View()
    for i, events in enumerate(calls):
        publisher.publish(events)
        for event in events:
            model.apply(event)
        if i % 3 == 0:
            view.read(publisher.take_records(float(i), force=True))
            assert view.pages == model.pages
    view.read(publisher.take_records(1000.0, force=True))
    assert view.pages == model.pages


@given(calls)
def test_a_resync_alone_restores_everything(calls: list[list[EngineEvent]]) -> None:
    publisher, model = make(batch_pages=5), Model()
    for events in calls:
        publisher.publish(events)
        for event in events:
            model.apply(event)
    view = View()
    view.read(publisher.take_records(1000.0, force=True))
    assert view.num_resyncs == 1
    assert view.pages == model.pages


@given(calls, st.integers(1, 4))
def test_a_full_ledger_and_its_reader_agree(calls: list[list[EngineEvent]], ledger_pages: int) -> None:
    publisher, view = make(ledger_pages=ledger_pages), View()
    for events in calls:
        publisher.publish(events)
        publisher.check()
        view.read(publisher.take_records(1000.0, force=True))
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
    for step in (step for record in records for step in decode_batch(record.payload).steps):
        if isinstance(step, StoredPages):
            begins = np.unpackbits(step.chain_starts, count=len(step.hashes), bitorder="little")
            chains, previous = iter(step.parents.tolist()), 0
            for begin, name in zip(begins, step.hashes.tolist(), strict=True):
                pages.append((step.medium, name, next(chains) if begin else previous))
                previous = name
    return pages
