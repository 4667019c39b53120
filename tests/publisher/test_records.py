"""`EventPublisher` without tasks: which events become which records, and what is refused."""

import logging
import tracemalloc
from typing import Any

import numpy as np
import pytest

from kv_events.codec import StoredPages
from kv_events.hashing import namespace_seed, sequence_hashes
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.schema import BlockRemoved, BlockStored, SnapshotBegin, StorageMedium
from publisher import EventPublisher
from publisher.event_columns import MAX_PAGES_PER_EVENT
from tests.rigs.publisher import NOW, batches_of, make_begun, num_pages, steps_of, stored
from tests.support.log.records import words


def drain(publisher: EventPublisher) -> list[Any]:
    return steps_of(publisher.take_records(NOW, force=True))


def test_a_record_has_the_streams_key_numbers_and_time() -> None:
    publisher = make_begun()
    publisher.publish([stored(1)])
    (record,) = publisher.take_records(NOW, force=True)
    (batch,) = batches_of([record])
    assert (batch.seq, batch.epoch, batch.stream, batch.timestamp) == (1, publisher.epoch, publisher.stream, NOW)
    assert (record.key, record.timestamp_ms, record.num_pages) == (b"default/m/w/0", int(NOW * 1000), 1)


SALTED = stored(1, extra_key="x", sequence_hashes=words([555]))
SAME_PAGE = stored(2, sequence_hashes=words([101]))
STEPS: list[tuple[list[Any], list[tuple[list[int], list[int]]], dict[str, int]]] = [
    (  # pages of one prompt, stored one by one, are one chain
        [stored(1), stored(2, parent=1), stored(3, parent=2), stored(4, parent=3)],
        [([101, 102, 103, 104], [0])],
        {"stored": 4},
    ),
    ([stored(7, parent=2)], [([107], [0])], {"parent_unknown": 1}),
    (  # what changes nothing is only counted
        [stored(1), stored(1), BlockRemoved([9]), BlockRemoved([1], StorageMedium.DISK)],
        [([101], [0])],
        {"stored": 1, "stored_again": 1, "removed_unknown": 2},
    ),
    ([stored(1), SALTED, BlockRemoved([1])], [([101, 555], [0, 0]), ([101], [])], {"held": 1}),
    ([stored(1), SAME_PAGE, BlockRemoved([1])], [([101], [0])], {"held": 1}),
    ([stored(1), SAME_PAGE, BlockRemoved([1, 2])], [([101], [0]), ([101], [])], {"held": 0, "removed": 1}),
    ([stored(1), stored(1, sequence_hashes=words([9]))], [([101], [0])], {"kept_first_hash": 1}),
]


@pytest.mark.parametrize(("events", "steps", "counts"), STEPS)
def test_events_become_steps_and_are_counted(events: list[Any], steps: list[Any], counts: dict[str, int]) -> None:
    publisher = make_begun()
    for event in events:
        publisher.publish([event])
    found = [(step.hashes.tolist(), getattr(step, "parents", np.zeros(0)).tolist()) for step in drain(publisher)]
    assert found == steps
    assert counts.items() <= publisher.stats().pages.items()
    publisher.check()


def test_a_child_names_its_parent_by_the_sequence_hash() -> None:
    publisher = make_begun()
    publisher.publish([stored(1, 2)])
    drain(publisher)
    publisher.publish([stored(7, parent=2)])
    (step,) = drain(publisher)
    assert step.parents.tolist() == [102]


def test_pages_without_sequence_hashes_are_named_from_their_tokens() -> None:
    publisher = make_begun()
    tokens = np.arange(12, dtype=np.uint32)
    names = sequence_hashes(tokens, 4, namespace_seed(cache_salt="salt")).tolist()
    first = BlockStored([1, 2], None, tokens[:8].tolist(), 4, extra_key="salt")
    second = BlockStored([3], 2, tokens[8:].tolist(), 4, extra_key="salt")
    orphan = BlockStored([4], 77, tokens[8:].tolist(), 4, extra_key="salt")
    publisher.publish([first, second, orphan])
    (step,) = drain(publisher)
    assert step.hashes.tolist() == names
    assert publisher.stats().rejected_events == {"unidentified": 1}


def test_a_full_ledger_drops_the_page_from_the_stream_too() -> None:
    publisher = make_begun(ledger_pages=2)
    publisher.publish([stored(1, 2, 3)])
    (batch,) = batches_of(publisher.take_records(NOW, force=True))
    assert [step.hashes.tolist() for step in batch.steps if isinstance(step, StoredPages)] == [[101, 102]]
    assert batch.digest.tolist()[0] == 2
    assert publisher.stats().pages["ledger_full"] == 1


def a_store(**fields: Any) -> BlockStored:
    good = {"block_hashes": [5, 6], "parent_block_hash": None, "token_ids": list(range(8)), "block_size": 4}
    return BlockStored(**{**good, "sequence_hashes": words([11, 12]), **fields})


PAGES, PARENT, SIZE, TOKENS, NAMES = "block_hashes", "parent_block_hash", "block_size", "token_ids", "sequence_hashes"
BAD: list[tuple[str, list[Any]]] = [
    ("medium", [stored(5, medium=medium) for medium in ("gpu", "TAPE", 3, ["GPU"], b"GPU", np.zeros(2))]),
    ("extra_key", [stored(5, extra_key=key) for key in ("\ud800", "x" * 1025)]),
    ("type", [stored(5, extra_key=7), BlockRemoved(None), "BlockStored", None]),  # type: ignore[arg-type]
    ("type", [a_store(**{PAGES: names}) for names in ("ab", b"ab", None, [1, "2"], [1.0, 2.5])]),
    ("type", [a_store(**{PARENT: "root"}), a_store(**{SIZE: [4]}), a_store(**{TOKENS: 8}), a_store(**{NAMES: [1, 2]})]),
    ("type", [stored(5, parent="x", sequence_hashes=b"")]),  # type: ignore[arg-type]
    ("type", [a_store(**{TOKENS: [(1, 2), 3, 4, 5, 6, 7, 8, 9], NAMES: b""})]),
    ("hash_range", [a_store(**{PAGES: [1, 2**64]}), a_store(**{PAGES: [1, -(2**63) - 1]}), a_store(**{PARENT: 2**70})]),
    ("hash_range", [BlockRemoved([2**64])]),
    ("hash_count", [a_store(**{NAMES: words([11])}), a_store(**{NAMES: b"12345678901"})]),
    ("hash_count", [BlockRemoved([0] * (MAX_PAGES_PER_EVENT + 1))]),
    ("block_size", [a_store(**{SIZE: size}) for size in (0, -4, 2**70, None)]),
    ("token_count", [a_store(**{PAGES: [5]}), a_store(**{TOKENS: [1, 2, 3]})]),
    ("unidentified", [a_store(**{TOKENS: [], NAMES: b""})]),
    (
        "tokens",
        [
            a_store(**{TOKENS: tokens, NAMES: b""})
            for tokens in (
                [-1, *range(7)], [2**32, *range(7)], ["x", *range(7)], [(1, 2), (9, 3), *[(3, 3)] * 6], [(1, 2, 3)] * 8
            )
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "bad"), [(reason, bad) for reason, all_bad in BAD for bad in all_bad])
def test_a_bad_event_is_dropped_and_counted_and_the_rest_continues(reason: str, bad: Any) -> None:
    publisher = make_begun()
    publisher.publish([stored(1), bad, stored(2)])
    assert [h for step in drain(publisher) for h in step.hashes.tolist()] == [101, 102]
    assert publisher.stats().rejected_events == {reason: 1}
    publisher.check()


def test_bad_events_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    publisher = make_begun()
    for _ in range(50):
        publisher.publish([None])  # type: ignore[list-item]
    assert [r.getMessage() for r in caplog.records] == ["publisher w: engine events dropped so far: {'type': 1}"]


def test_what_is_no_list_of_events_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    publisher = make_begun()
    with caplog.at_level(logging.CRITICAL):
        publisher.publish(None)  # type: ignore[arg-type]
    publisher.publish([stored(1)])
    steps = drain(publisher)
    assert steps[0] == SnapshotBegin("internal error")
    assert steps[1].hashes.tolist() == [101]


def test_tokens_travel_only_when_asked_for() -> None:
    event = BlockStored([1], None, [70_000, 1, 2, 3], 4, sequence_hashes=words([9]), extra_key="secret salt")
    plain, with_tokens = make_begun(), make_begun(with_tokens=True)
    for publisher in (plain, with_tokens):
        publisher.publish([event, event, stored(2)])
    (record,) = plain.take_records(NOW, force=True)
    assert b"secret" not in record.payload
    (record,) = with_tokens.take_records(NOW, force=True)
    assert np.array([70_000, 1, 2, 3], "<u4").tobytes() in record.payload
    assert b"secret salt" in record.payload
    assert len(batches_of([record])[0].steps) == 2


def test_an_overflow_drops_the_tokens_of_the_stores_that_it_drops() -> None:
    publisher = make_begun(with_tokens=True, queue_pages=2)
    for name in (1, 2):
        publisher.publish([BlockStored([name], None, [name] * 4, 4, sequence_hashes=words([name]))])
    publisher.publish([BlockRemoved([1])])
    assert SnapshotBegin("overflow") in steps_of(publisher.take_records(NOW + 60, force=True))
    publisher.publish([BlockStored([4], None, [4] * 4, 4, sequence_hashes=words([4]))])
    (record,) = publisher.take_records(NOW + 61, force=True)
    assert [token for token in (1, 2, 4) if np.full(4, token, "<u4").tobytes() in record.payload] == [4]


def test_stores_after_an_overflow_take_no_memory_for_their_tokens() -> None:
    publisher = make_begun(with_tokens=True, queue_pages=2, block_size=1024)
    events = [[BlockStored([i], None, [i] * 1024, 1024, sequence_hashes=words([i]))] for i in range(1, 400)]
    tracemalloc.start()
    try:
        for event in events:
            publisher.publish(event)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert publisher.stats().is_broken
    assert grown < 400_000  # a quarter of the tokens


def test_records_with_tokens_keep_within_the_largest_record() -> None:
    publisher = make_begun(with_tokens=True, block_size=1024, batch_bytes=900_000)
    for i in range(500):
        event = BlockStored([i], None, [2**31] * 1024, 1024, sequence_hashes=words([i]), extra_key=f"{i}" * 300)
        publisher.publish([event])
    records = publisher.take_records(NOW, force=True)
    assert max(len(record.payload) for record in records) <= MAX_RECORD_BYTES
    assert num_pages(steps_of(records)) == 500
