"""Nearly valid bytes: examples that decoders accept, with a few unexpected changes."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

MAX_BYTES = 2**19

_INTERESTING = [
    b"", b"\x00", b"\xff", b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x80" + bytes(7), b"\xc0", b"\xc1", b"\xc4\xff",
    b"\xc6\xff\xff\xff\xff", b"\xca", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xd9\xff",
    b"\xdb\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x90", b"\x80",
    b"[" * 200, b"\x91" * 2000, b'{"a":' * 200, b"-1", b"1e999", b"NaN", b'"\\ud800"', b"18446744073709551616", b"null",
]  # fmt: skip

_edits = st.tuples(
    st.sampled_from(["put", "insert", "delete", "repeat", "cut"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 64),
    st.sampled_from(_INTERESTING) | st.binary(min_size=1, max_size=9),
)

_leaps = st.tuples(st.just("swell"), st.floats(0, 1, exclude_max=True), st.integers(1, 64), st.just(b""))
"""Edits that make an input very long."""

_SELDOM = 20
"""One of this many edited inputs contains such an edit."""

_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def near(examples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return an example with some bytes changed, two examples spliced together, or random bytes."""
    usual, leaping = st.lists(_edits, max_size=6), st.tuples(_edits, _leaps, _edits)
    edits = st.integers(1, _SELDOM).flatmap(lambda number: leaping if number == _SELDOM else usual)
    edited = st.builds(_edited, st.sampled_from(examples), edits)
    crossed = st.builds(
        lambda a, b, where: a[: int(where * len(a))] + b[int(where * len(b)) :],
        st.sampled_from(examples),
        st.sampled_from(examples),
        st.floats(0, 1),
    )
    return edited | crossed | near_objects(examples) | st.binary(max_size=200)


def near_objects(examples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return an example in msgpack or JSON with one of its values replaced. Other examples are unchanged."""
    return st.builds(_exchanged, st.sampled_from(examples), st.lists(st.integers(0, 63), max_size=6), _values)


def _edited(data: bytes, edits: Iterable[tuple[str, float, int, bytes]]) -> bytes:
    for kind, where, length, content in edits:
        at = int(where * len(data))
        match kind:
            case "put":
                data = data[:at] + content + data[at + len(content) :]
            case "insert":
                data = data[:at] + content + data[at:]
            case "delete":
                data = data[:at] + data[at + length :]
            case "repeat":
                data = data[:at] + data[at : at + length] * 20 + data[at:]
            case "swell":
                data = data[:at] + data[at : at + length] * (MAX_BYTES // (2 * length)) + data[at:]
            case "cut":
                data = data[:at]
    return data[:MAX_BYTES]


def _exchanged(data: bytes, path: list[int], value: Any) -> bytes:
    for codec in (msgspec.msgpack, msgspec.json):
        try:
            return bytes(codec.encode(_with(codec.decode(data), path, value)))
        except (msgspec.DecodeError, msgspec.EncodeError, ValueError, TypeError, OverflowError, RecursionError):
            continue
    return data


def _with(tree: Any, path: list[int], value: Any) -> Any:
    """Return the tree with the value at the end of the path replaced."""
    if not path or not isinstance(tree, list | dict) or not tree:
        return value
    if isinstance(tree, list):
        place = path[0] % len(tree)
        return [*tree[:place], _with(tree[place], path[1:], value), *tree[place + 1 :]]
    key = list(tree)[path[0] % len(tree)]
    return {**tree, key: _with(tree[key], path[1:], value)}
