"""Conversion of engine events to columns, and of page changes to wire events."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.codec import RemovedPages, StoredPages, decode_batch, encode_batch
from kv_events.limits import MAX_EVENTS_PER_BATCH
from kv_events.schema import AllBlocksCleared, BlockRemoved, StorageMedium
from kv_events.streams import StreamId
from publisher.event_columns import medium_index, removed_words
from publisher.kernels.changes import CLEARED, REMOVAL, PageChanges
from publisher.kernels.events import PageEvents
from publisher.packing import EVENT_BYTES, PageTokens, num_fitting, pack
from tests.models.stream_reader import StreamReader
from tests.rigs.publisher import make_publisher, stored


@pytest.mark.parametrize("names", [[-1, -(2**63)], [2**64 - 1, 2**63], [-1, 2**63]])
def test_signed_and_unsigned_block_hashes_are_the_same_name(names: list[int]) -> None:
    assert removed_words([BlockRemoved(names)]).tolist() == [2**64 - 1, 2**63]


def test_media_are_tiers_and_none_is_the_fastest() -> None:
    assert [medium_index(m) for m in (None, *StorageMedium)] == [0, 0, 1, 2, 3]
    assert medium_index("CPU_PINNED") == 1


@given(st.lists(st.integers(0, 25), max_size=12), st.integers(1, 10), st.randoms(use_true_random=False))
def test_parts_of_columns_state_what_the_whole_states(lengths: list[int], max_pages: int, random: Random) -> None:
    num_pages = sum(lengths)
    whole = PageEvents(
        np.arange(num_pages, dtype=np.uint64) + 1000,
        np.arange(num_pages, dtype=np.uint64) + 2000,
        np.array(lengths, np.int64),
        np.arange(len(lengths), dtype=np.uint64),
        np.array([random.randrange(2) for _ in lengths], np.uint8),
        np.array([random.randrange(8) for _ in lengths], np.uint8),
    )
    parts = list(whole.parts(max_pages))
    assert [page for part in parts for page in pages_of(part)] == pages_of(whole)
    for part in parts:
        assert len(part.block_hashes) == part.lengths.sum() <= max_pages or part is whole
        assert len(part.kinds) == len(part.lengths) == len(part.parents) == len(part.has_parent)


def pages_of(events: PageEvents) -> list[tuple[int, int, int, int | None]]:
    """Return the kind, both hashes and the parent of every page."""
    rows, page = [], 0
    for length, parent, has_parent, kind in zip(*events[2:], strict=True):
        before = int(parent) if has_parent else None
        for _ in range(length):
            block_hash = int(events.block_hashes[page])
            rows.append((int(kind), block_hash, int(events.hashes[page]), before))
            before, page = block_hash, page + 1
    return rows


# --- wire events ----------------------------------------------------------------------------------------------------

STREAM = StreamId("meta-llama/Llama-3.1-8B-Instruct", "default", "worker-12", 0)


def changes(*rows: tuple[int, int, int]) -> PageChanges:
    """Return changes from rows of (kind, sequence hash, parent). Block hashes are sequence hashes plus 1000."""
    kinds, hashes, parents = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    spans = np.array(groups_of([(kind, page) for kind, page, _ in rows]), np.uint32)
    return PageChanges(kinds.astype(np.uint8), hashes, hashes + np.uint64(1000), parents, spans)


def groups_of(rows: list[tuple[int, int]]) -> list[int]:
    """Return a span for each kind and page, with numbers that wrap around. No span removes a page that it stored."""
    span, spans = 2**32 - 2, []
    stored: set[tuple[int, int]] = set()
    for kind, page in rows:
        if kind == CLEARED or (kind - REMOVAL, page) in stored:
            span, stored = span + 1, set()
        spans.append(span % 2**32)
        if kind < REMOVAL:
            stored.add((kind, page))
        elif kind == CLEARED:
            span += 1
    return spans


def read(events: list[bytes]) -> list[Any]:
    return decode_batch(encode_batch(STREAM, 16, 1, 0, 0.0, events, bytes(64))).steps


def test_stores_and_removals_in_turn_become_two_events() -> None:
    rows = [(REMOVAL + i // 10 % 2, i, 0) if i % 4 < 2 else (i // 10 % 2, i, i - 1) for i in range(100, 200)]
    steps = read(pack(changes(*rows)))
    assert [(type(step), step.medium) for step in steps] == [
        (RemovedPages, 0),
        (RemovedPages, 1),
        (StoredPages, 0),
        (StoredPages, 1),
    ]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, REMOVAL, REMOVAL + 1, CLEARED]), st.integers(1, 6)), max_size=60),
    st.sampled_from([1, 2**32]),
)
def test_changes_lead_where_they_would_lead_one_by_one(rows: list[tuple[int, int]], factor: int) -> None:
    held: set[tuple[int, int]] = set()
    for kind, page in rows:
        if kind == CLEARED:
            held.clear()
        elif kind < REMOVAL:
            held.add((kind, page * factor))
        else:
            held.discard((kind - REMOVAL, page * factor))
    events = pack(changes(*[(kind, page * factor, 0) for kind, page in rows])) if rows else []
    assert StreamReader().apply(read(events)) == held


@given(st.lists(st.tuples(st.sampled_from([0, 1, REMOVAL, REMOVAL + 1, CLEARED]), st.integers(1, 6)), min_size=1))
def test_a_batch_never_has_more_events_than_were_reckoned(rows: list[tuple[int, int]]) -> None:
    some = changes(*[(kind, page, 0) for kind, page in rows])
    for max_bytes in (200, 400, 800):
        fitting = some.part(0, num_fitting(some, max_bytes))
        assert len(fitting.kinds) == 1 or len(pack(fitting)) * EVENT_BYTES <= max_bytes


def test_pages_that_move_to_another_tier_one_by_one_are_few_events() -> None:
    publisher = make_publisher()
    pages = range(1, 1001)
    publisher.publish([stored(page) for page in pages])
    publisher.take_records(0.0, force=True)
    for page in pages:
        publisher.publish([stored(page, medium=StorageMedium.CPU), BlockRemoved([page], StorageMedium.GPU)])
    (record,) = publisher.take_records(0.0, force=True)
    assert len(decode_batch(record.payload).steps) <= 3


def test_the_smallest_batches() -> None:
    assert pack(changes((0, 1, 0)).part(0, 0)) == []
    assert read(pack(changes((CLEARED, 0, 0), (CLEARED, 0, 0)))) == [AllBlocksCleared(), AllBlocksCleared()]
    assert len(read(pack(changes((0, 1, 0)), [PageTokens(b"aaaa", None)]))) == 1


def test_tokens_go_with_the_pages_and_extra_keys_split_events() -> None:
    tokens = [PageTokens(b"aaaa", None), PageTokens(b"bbbb", None), PageTokens(b"cccc", "salt")]
    events = pack(changes((0, 1, 0), (REMOVAL, 9, 0), (0, 2, 1), (0, 3, 0)), tokens)
    assert [bytes(c) in events[0] for c in (b"aaaa", b"bbbb")] == [True, False]
    assert [b"aaaa" in e for e in events] == [True, False, False, False]
    assert [b"bbbb" in e for e in events] == [False, False, True, False]
    assert [b"cccc" in e and b"salt" in e for e in events] == [False, False, False, True]


@pytest.mark.parametrize("num_pages", [4, 8, 64, 4096])
def test_ordinary_chains_keep_the_wire_budget(num_pages: int) -> None:
    rows = [(1, i + 1, i if i % 4 else 10**18 + i) for i in range(num_pages)]
    record = encode_batch(STREAM, 16, 2**60, 2**20, 1.7e9, pack(changes(*rows)), bytes(64))
    assert len(record) <= 24 * num_pages + 200


def test_a_batch_is_cut_by_bytes_and_never_larger() -> None:
    rows = changes(*[(i // 5 % 3, i + 1, 10**18) for i in range(1000)])
    for max_bytes in (1, 500, 5000, 50_000):
        count = num_fitting(rows, max_bytes)
        assert 1 <= count <= 1000
        assert count == 1 or sum(map(len, pack(rows.part(0, count)))) <= max_bytes
        assert count == 1000 or max_bytes < 100 or count * 25 > (max_bytes - 2 * EVENT_BYTES) / 3


def test_a_batch_has_never_more_events_than_a_reader_takes() -> None:
    rows = changes(*[(i % 2 * REMOVAL, 1, 0) for i in range(2 * MAX_EVENTS_PER_BATCH)])
    count = num_fitting(rows, 10**6)
    assert len(pack(rows.part(0, count))) == MAX_EVENTS_PER_BATCH - 2
