"""Records of reservations, single and joined."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.errors import RecordRejectedError
from kv_events.reservations import (
    MAX_JOINED,
    OUTPUT_BLOCK,
    RELEASED,
    VERSION,
    Progressed,
    decode_reservation,
    encode_reservation,
    joined,
    singles,
)
from tests.support.replica_process import reserved

NAMES = st.text(min_size=1, max_size=20).filter(lambda text: "\0" not in text)
RECORDS = st.one_of(
    st.builds(reserved, NAMES, NAMES, st.lists(st.integers(0, 2**64 - 1), max_size=40), st.floats(0, 2e9)),
    st.builds(Progressed, st.just(VERSION), NAMES, NAMES, st.floats(0, 2e9), st.just(RELEASED)),
    st.builds(
        Progressed, st.just(VERSION), NAMES, NAMES, st.floats(0, 2e9), st.just(OUTPUT_BLOCK), st.none(), st.just(3)
    ),
)


@given(st.lists(RECORDS, min_size=1, max_size=40))
def test_joined_records_are_an_array_of_them_and_come_back_one_by_one(records: list[Progressed]) -> None:
    payloads = list(map(encode_reservation, records))
    several = joined(len(payloads), b"".join(payloads))
    assert several.startswith(b"\x93\xa7Several")
    assert msgspec.msgpack.decode(several) == ["Several", VERSION, list(map(msgspec.msgpack.decode, payloads))]
    assert singles(several) == payloads
    assert list(map(decode_reservation, singles(several))) == records
    assert [singles(each) for each in payloads] == [[each] for each in payloads]


@pytest.mark.parametrize(
    "payload",
    [
        joined(MAX_JOINED + 1, b"\xc0" * (MAX_JOINED + 1)),
        joined(1, b""),
        msgspec.msgpack.encode(["Several", VERSION + 256, []]),
        msgspec.msgpack.encode(["Several", VERSION, 7]),
        msgspec.msgpack.encode(["Several", VERSION, [None]]),
        msgspec.msgpack.encode(["Several", VERSION, [["Several", VERSION, []]]]),
    ],
)
def test_what_is_broken_in_a_record_is_rejected_when_it_is_decoded(payload: bytes) -> None:
    broken = singles(payload)
    assert len(broken) == 1
    with pytest.raises(RecordRejectedError):
        decode_reservation(broken[0])


def test_one_broken_record_leaves_the_others() -> None:
    first = encode_reservation(Progressed(VERSION, "x", "r0", 1.0, RELEASED))
    assert singles(joined(3, first + b"\xc0" + first)) == [first, b"\xc0", first]


def test_trailing_fields_are_ignored() -> None:
    assert singles(msgspec.msgpack.encode(["Several", VERSION + 1, [1, 2], "new"])) == [b"\x01", b"\x02"]
