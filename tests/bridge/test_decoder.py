"""The decoder compared with a slow reference decoder, on valid, unusual and broken input."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.decoding.decoder import MAX_PAYLOAD_BYTES, Decoder, UndecodableError
from tests.models.reference_decoder import decoded, joined, reference
from tests.support.engines.event_payloads import REMOVED_FIELDS, STORED_FIELDS, cleared, payload, stored

# --- input ----------------------------------------------------------------------------------------------------------

any_int = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32])
scalar = st.none() | st.booleans() | any_int | st.floats() | st.text(max_size=5) | st.binary(max_size=12)
junk = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
good_hash = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=32)
token = st.integers(0, 2**32 - 1) | st.integers(0, 200)
pair_row = st.lists(token, min_size=2, max_size=8).map(lambda row: [list(p) for p in itertools.pairwise(row)])
name = st.none() | st.sampled_from(["", "GPU", "CPU", "x"]) | st.text(max_size=4)
FIELD_VALUES = {
    "block_hashes": st.lists(good_hash, max_size=4),
    "parent_block_hash": st.none() | good_hash,
    "token_ids": st.lists(token, max_size=9) | pair_row | st.none(),
    "block_size": st.sampled_from([0, 1, 2, 3, None]),
    "lora_id": st.none() | st.integers(-2, 5),
    "medium": name,
    "lora_name": name,
    "extra_keys": st.none() | st.lists(st.none() | st.lists(scalar, max_size=2), max_size=3),
    "group_idx": st.none() | st.integers(0, 3),
    "kv_cache_spec_kind": name,
    "kv_cache_spec_sliding_window": junk,
    "locality": name,
    "cache_salt": name,
    "event_type": st.just("stored"),
    "session_id": junk,
}


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.sets(st.sampled_from(sorted(FIELD_VALUES)), max_size=15))
    odd = draw(st.none() | st.sampled_from(sorted(FIELD_VALUES)))
    if draw(st.integers(0, 5)) != 0:
        chosen -= {"event_type"}
    return {field: draw(junk if field == odd else FIELD_VALUES[field]) for field in chosen}


tag = st.sampled_from(["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
map_event = st.tuples(tag | st.none(), fields(), st.permutations(["type", "rest"])).map(
    lambda drawn: dict(
        sorted(
            {**drawn[1], **({"type": drawn[0]} if drawn[0] else {})}.items(),
            key=lambda item: (item[0] == "type") == (drawn[2][0] == "rest"),
        )
    )
)
array_event = st.tuples(st.just("BlockStored"), fields(), st.integers(0, 13)).map(
    lambda drawn: [drawn[0], *(drawn[1].get(field) for field in STORED_FIELDS), 1, [2]][: drawn[2]]
) | st.tuples(st.just("BlockRemoved"), fields(), st.integers(0, 6)).map(
    lambda drawn: [drawn[0], *(drawn[1].get(field) for field in REMOVED_FIELDS), 1, [2]][: drawn[2]]
)
plain_event = st.builds(
    stored, st.lists(good_hash, min_size=1, max_size=2), st.just([1, 2, 3, 4]), st.sampled_from([2, 4])
).map(lambda event: ["BlockStored", *(event[field] for field in STORED_FIELDS[:4])])
events = st.lists(map_event | array_event | array_event | plain_event | junk, max_size=8)


@given(events, st.sampled_from(["array", "pair", "map"]), st.none() | st.integers(0, 2**31 - 1))
def test_every_event_is_read_as_the_reference_reads_it(some: list[Any], batch: Any, rank: int | None) -> None:
    data = msgspec.msgpack.encode(
        {"rank": 1, "events": some, "ts": 1.0, "data_parallel_rank": rank}
        if batch == "map"
        else [1.0, some]
        if batch == "pair"
        else [None, some, rank, "more"]
    )
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(some))
    found_rank, found, count = decoded(data)
    expected = [reference(event) for event in plain]
    # events that the kernels pass on in encoded form may be rejected by their own decoder
    found_and_expected = [
        ("envelope" if e == "envelope" else f, e) for f, e in zip(joined(found), joined(expected), strict=True)
    ]
    assert [f for f, _ in found_and_expected] == [e for _, e in found_and_expected]
    assert count == len(some)
    assert found_rank == (None if batch == "pair" else rank)


@given(events, st.data())
def test_broken_bytes_never_harm_and_what_is_before_the_break_is_read(some: list[Any], data: st.DataObject) -> None:
    whole = msgspec.msgpack.encode([1.0, some, 0])
    cut = data.draw(st.integers(0, len(whole) - 1))
    try:
        _, found, _ = decoded(whole[:cut])
    except UndecodableError:
        return
    _, expected, _ = decoded(whole)
    sure = list(joined(found)[:-2])
    assert sure == joined(expected)[: len(sure)]


def test_neighbours_that_state_the_same_come_as_one_run() -> None:
    alike = [stored([i], [1, 2, 3, 4], medium="GPU") for i in range(5)]
    runs = list(
        Decoder()
        .decode(payload(*alike, stored([9], [1, 2, 3, 4], medium="CPU"), cleared(), cleared(), {}, {}, None))
        .runs
    )
    assert [count for _, count in runs] == [6, 2, 2, 1]


def test_a_decoder_can_be_used_again_after_anything() -> None:
    decoder = Decoder()
    small, large = payload(stored([1], [1, 2, 3, 4])), payload(stored(range(1000), [2] * 4000))
    for data in (small, large, small):
        assert decoded(data, decoder) == decoded(data)
    with pytest.raises(UndecodableError):
        decoder.decode(b"\xc0")
    assert decoded(small, decoder) == decoded(small)


@pytest.mark.parametrize(
    "data", [b"", b"\x90", b"\x91\x01", b"\x80", b"\x81\xa6events\x01", b"\xa1x", b"\x93\x01\x02\x03"]
)
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(UndecodableError):
        Decoder().decode(data)


def test_a_payload_beyond_the_bound_is_refused_unread() -> None:
    with pytest.raises(UndecodableError, match="at most"):
        Decoder().decode(bytes(MAX_PAYLOAD_BYTES + 1))


def test_claimed_lengths_allocate_nothing() -> None:
    for head in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        _, found, _ = decoded(b"\x93\x01\x91\x92\xabBlockStored" + head)
        assert found == ["bad"]


def test_deep_nesting_is_walked_not_recursed_into() -> None:
    deep = b"\x91" * 100_000 + b"\x01"
    event = b"\x9c\xabBlockStored" + msgspec.msgpack.encode([1])[0:] + b"\xc0" * 10
    data = b"\x92\x01\x93" + event + b"\x92\xb0AllBlocksCleared" + deep + b"\x91\xb0AllBlocksCleared"
    _, found, _ = decoded(data)
    assert [f if isinstance(f, str) else f[0] for f in found] == ["stored", "cleared", "cleared"]
    extra = b"\x99\xabBlockStored\x91\x01\xc0\x91\x05\x01\xc0\xc0\xc0" + deep
    assert decoded(b"\x92\x01\x91" + extra)[1] == ["bad"]


def test_a_rank_that_makes_no_sense_is_reported_and_not_used() -> None:
    for rank in (-1, "0", 2**40, 1.5):
        batch = Decoder().decode(msgspec.msgpack.encode([1.0, [], rank]))
        assert (batch.rank, batch.num_bad_ranks) == (None, 1)
