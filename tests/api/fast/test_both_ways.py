"""Bodies that the fast path takes get the answer of FastAPI. msgspec decodes the others."""

import ctypes
import json
import mmap
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.fast.kernels.recognise import MAX_TEMPLATE_BYTES, packed_numbers
from api.problems import ProblemError
from api.queries.body_formats import format_of
from api.queries.parsing import BY_HASH, BY_TOKENS, decode_question
from indexer.settings import IndexerSettings
from tests.rigs.both_ways import PROMPT, BothWays
from tests.support.effort import num_examples
from tests.support.log.hand_fed import HandFed

MSGPACK = "application/msgpack"
both_ways = BothWays(HandFed(IndexerSettings(max_pages=1000)))

tokens = st.lists(st.integers(0, 2**17) | st.integers(-1, 2**32), max_size=5) | st.just(PROMPT)
hashes = st.lists(st.integers(-(2**63) - 1, 2**64), max_size=4)
words = st.sampled_from(["m", "hybrid", "", "ü", '"token_ids":[1]', "\\", "a" * 40])
numbers = {"token_ids": tokens, "seq_hashes": hashes, "block_hashes": hashes, "block_hash": hashes}
others = {
    **dict.fromkeys(["model_name", "model", "modelname", "lora_name", "cache_salt", "routing_group", "x"], words),
    **dict.fromkeys(["tenant_id", "instance_id", "additionalsalt", "additional_salt"], words),
    "block_size": st.sampled_from([4, 16, 0, "16"]),
    "is_eagle": st.sampled_from([True, False, None, 1]),
    "tier_weights": st.sampled_from([[1.0, 0.5, 0.2, 0.1], {"gpu": 1}, [1], None]),
    "nested": st.sampled_from([{"token_ids": [1, 2]}, [{"seq_hashes": [3]}], [[]]]),
}
members = st.one_of([st.tuples(st.just(name), values) for name, values in (numbers | others).items()])
usual = st.tuples(st.just("model_name"), words), st.tuples(st.just("token_ids"), tokens)
rfc = st.tuples(st.just("model"), words), st.tuples(st.just("block_size"), st.just(4))
bodies = st.one_of(
    st.lists(members, max_size=5),
    st.tuples(*usual).map(list),
    st.tuples(*rfc, st.tuples(st.just("block_hashes"), hashes), members).map(list),
)
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")])


def text_of(body: list[tuple[str, Any]], separator: tuple[str, str], *, is_ascii: bool) -> bytes:
    """Encode an object whose fields may occur twice."""
    comma, colon = separator
    encoded = [
        json.dumps(name) + colon + json.dumps(value, separators=separator, ensure_ascii=is_ascii)
        for name, value in body
    ]
    return ("{" + comma.join(encoded) + "}").encode()


def packed_of(body: list[tuple[str, Any]]) -> bytes:
    """Encode the same as msgpack. Lists of numbers are bytes."""
    parts = [b"\xdf" + len(body).to_bytes(4, "big")]
    for name, value in body:
        if name in numbers and isinstance(value, list):
            bits = 32 if name == "token_ids" else 64
            value = np.array([each % 2**bits for each in value], f"<u{bits // 8}").tobytes()
        parts += msgspec.msgpack.encode(name), msgspec.msgpack.encode(value)
    return b"".join(parts)


def check(data: bytes, fields: tuple[str, ...], content_type: str = "application/json") -> bool:
    """Compare both ways for a body. Returns whether the fast path took it."""
    path = "/query" if fields == BY_TOKENS else "/query_by_hash"
    return both_ways.agree(data, path, content_type)


@settings(max_examples=num_examples(3_000))
@given(bodies, separators, st.booleans(), st.sampled_from([BY_TOKENS, BY_HASH]))
def test_both_ways_agree(
    body: list[tuple[str, Any]], separator: tuple[str, str], is_ascii: bool, fields: tuple[str, ...]
) -> None:
    check(text_of(body, separator, is_ascii=is_ascii), fields)
    check(packed_of(body), fields, MSGPACK)


@settings(max_examples=num_examples(3_000))
@given(bodies, st.data())
def test_a_damaged_body_is_never_read_as_another_one(body: list[tuple[str, Any]], data: st.DataObject) -> None:
    text = bytearray(text_of(body, (",", ":"), is_ascii=True))
    template = both_ways.template(bytes(text))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b'"', b"[", b"]", b"0", b",", b"\\"])
        )
    for fields in (BY_TOKENS, BY_HASH):
        check(bytes(text), fields)
    if template is not None:
        both_ways.agree_directly(template, [bytes(text)])


@settings(max_examples=num_examples(3_000))
@given(bodies, st.data())
def test_damaged_msgpack_is_never_read_as_another_body(body: list[tuple[str, Any]], data: st.DataObject) -> None:
    packed = bytearray(packed_of(body))
    template = both_ways.template(bytes(packed), MSGPACK)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(packed)))
        packed[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b"\x80", b"\x81", b"\xc4\x04", b"\xc5", b"\xa1", b"\xdf", b"\0"])
        )
    for fields in (BY_TOKENS, BY_HASH):
        check(bytes(packed), fields, MSGPACK)
    if template is not None:
        both_ways.agree_directly(template, [bytes(packed)])


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"model_name": "m", "token_ids": [1, 2, 3]}, BY_TOKENS),
        ({"model_name": "m", "token_ids": [1], "lora_name": "a", "cache_salt": "b", "unknown": {"x": [1]}}, BY_TOKENS),
        ({"model": "m", "block_size": 4, "tenant_id": "default", "token_ids": [5] * 40}, BY_TOKENS),
        ({"model_name": "m", "seq_hashes": [2**64 - 1, 0]}, BY_HASH),
        ({"model_name": "m", "block_hashes": [-(2**63), 2**63 - 1]}, BY_HASH),
        ({"model": "m", "block_size": 4, "block_hash": [7]}, BY_HASH),
    ],
)
def test_common_bodies_are_taken(body: dict[str, Any], fields: tuple[str, ...]) -> None:
    for separator in ((",", ":"), (", ", ": ")):
        assert check(text_of(list(body.items()), separator, is_ascii=True), fields)
    assert check(packed_of(list(body.items())), fields, MSGPACK)


@pytest.mark.parametrize(
    "text",
    [
        b'{"model_name":"m","x":{"token_ids":[1]},"token_ids":[2]}',
        b'{"model_name":"m","token_ids":[1],"token_ids":[2]}',
        b'{"model_name":"m","token_ids":[1],"token_ids":null}',
        b'{"model_name":"m","x":{"token_ids":[1]}}',
        b'{"model_name":"m","token_ids":[1]',
        b'{"model_name":"m","token_ids":[1]} {}',
        b'{"model_name":"m","token_ids":[1],"tier_weights":[2]}',
        b'{"token_ids":[1]}',
    ],
)
def test_an_array_in_another_place_is_read_by_the_decoder(text: bytes) -> None:
    assert not check(text, BY_TOKENS)


def test_the_numbers_of_a_body_do_not_leak_into_the_next_one() -> None:
    for values in (PROMPT, [1, 2, 3, 4], PROMPT[:12]):
        body = {"model_name": "m", "token_ids": values}
        assert check(json.dumps(body).encode(), BY_TOKENS)
        assert check(packed_of(list(body.items())), BY_TOKENS, MSGPACK)


def test_a_body_of_an_unknown_tenant_does_not_slow_down_those_that_begin_alike() -> None:
    usual = b'{"model_name":"m","token_ids":[1,2,3,4]}'
    assert check(usual, BY_TOKENS)
    assert not check(usual.replace(b"]}", b'],"routing_group":"nobody"}'), BY_TOKENS)
    assert check(usual, BY_TOKENS)


@pytest.mark.parametrize(
    "body",
    [
        [("model_name", "m"), ("x", b"1234"), ("token_ids", [1])],
        [("model_name", "m"), ("token_ids", [1]), ("token_ids", [2])],
        [("model_name", "m"), ("x", "y" * 5000), ("token_ids", [1])],
        [("model_name", "m"), ("token_ids", (1, 2))],
    ],
)
def test_bytes_in_another_place_have_no_template(body: list[tuple[str, Any]]) -> None:
    packed = packed_of(body)
    assert check(packed, BY_TOKENS, MSGPACK)
    assert both_ways.template(packed, MSGPACK) is None


def test_bytes_that_come_too_late_for_a_template_are_not_searched() -> None:
    for num_before, is_found in ((1000, True), (MAX_TEMPLATE_BYTES, False)):
        packed = packed_of([("x", "y" * num_before), ("token_ids", [1])])
        assert (packed_numbers(packed, 0, len(packed)) != (-1, -1, -1)) == is_found


def test_large_bytes_are_read_by_the_decoder() -> None:
    many_fields = [(f"x{i}", None) for i in range(1025)]
    assert not check(packed_of([*many_fields, ("model_name", "m"), ("token_ids", [1] * 70_000)]), BY_TOKENS, MSGPACK)


def test_an_error_is_that_of_the_decoder() -> None:
    text = b'{"model_name":"m","token_ids":[4294967296]}'
    assert not check(text, BY_TOKENS)
    with pytest.raises(ProblemError, match=r"token_ids\[0\]"):
        decode_question(text, format_of("application/json"), BY_TOKENS)


def memory_after_a_guard(size: int) -> npt.NDArray[np.uint8]:
    """Return memory before which no byte can be read. It is never released."""
    memory = mmap.mmap(-1, mmap.PAGESIZE + size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return np.frombuffer(memory, np.uint8, offset=mmap.PAGESIZE)


def test_nothing_before_a_request_is_read() -> None:
    both_ways.read_into(memory_after_a_guard(2**21))
    long, short = (b'{"model_name":"m","token_ids":[1,2,3,4]}' + b" " * spaces for spaces in (3900, 0))
    template = both_ways.template(long)
    assert template is not None
    assert both_ways.agree_directly(template, [long, short, long])[::2] == [True, True]
