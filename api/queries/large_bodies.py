"""The formats of bodies, and large bodies, which are decoded in slices.

A decoder holds the interpreter until it has finished, in any thread: decoding 24 MiB at once would block all other
callers. A kernel therefore finds the members of a large body. The long lists that a body may have are taken out, and
decoded in slices. The rest must be small.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from api.problems import ProblemError, ProblemKind
from api.queries.kernels.parts import json_parts, msgpack_after, msgpack_array, msgpack_parts
from kv_events.errors import InvalidValueError
from kv_events.http.queries import IntList, PeerQuery, RfcQuery

LARGE_BYTES = 2**18
"""Larger bodies are decoded in another thread."""
MAX_OTHER_BYTES = 2**19
"""Bound on all of a large body but its long lists."""
MAX_FIELDS = 1024
NUMBERS = ("token_ids", "seq_hashes", "block_hash", "block_hashes")
"""Fields with lists of numbers."""
_LISTS = (*NUMBERS, "queries", "decisions")

_SLICE_BYTES = 2**16
_SLICE_NUMBERS = 2**13
_MOST_BYTES_PER_NUMBER = 9  # in msgpack
_LONGEST_KEY = 256
_POSITION = re.compile(r" - at `\$\[(\d+)\]")

_P = ParamSpec("_P")
_T = TypeVar("_T")
T_co = TypeVar("T_co", covariant=True)
Body: TypeAlias = bytes | bytearray
Data: TypeAlias = Body | msgspec.Raw | memoryview
"""A body, or a part of one that is not decoded yet."""
Members: TypeAlias = list[tuple[memoryview, memoryview]]
"""Keys and values."""


class Decoder(Protocol[T_co]):
    """A decoder of msgspec."""

    @property
    def type(self) -> Any:
        """What it decodes."""

    def decode(self, data: Data, /) -> T_co:
        """Return the decoded data. Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError."""


class BodyFormat(NamedTuple):
    """A format of bodies."""

    decoder: Callable[[Any], Decoder[Any]]
    """Returns the decoder of a type, which is built once."""
    encode: Callable[[Any], bytes]
    peer: Decoder[PeerQuery[Any]]
    rfc: Decoder[RfcQuery[Any]]
    find_parts: Callable[..., int]
    """See `json_parts`."""
    join: Callable[[Members], bytes]
    """Return an object with these members."""
    slices: Callable[[str, memoryview], Iterator[bytes]]
    """Yield the parts of a list of numbers as lists that are small. Raises InvalidValueError, which names the field."""

    def decode(self, data: Data) -> Any:
        """Decode data without types."""
        return self.decoder(Any).decode(data)

    def parts(self, data: memoryview, most: int, *, is_object: bool) -> list[list[int]] | None:
        """Return begin and end of the keys and of the values of an object or a list, at least `most` + 1 if there are
        more. None: it is not such a value.
        """
        spans = np.empty((most + 1, 4), np.int64)
        found = self.find_parts(np.frombuffer(data, np.uint8), int(is_object), spans)
        return None if found < 0 else spans[:found].tolist()

    def name(self, key: memoryview) -> str:
        """Return a key as text."""
        try:
            return str(self.decode(key)) if len(key) <= _LONGEST_KEY else "body"
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "body"


class Slim(NamedTuple):
    """A body in two parts."""

    rest: Data
    """The body, in which `lists` are empty."""
    lists: dict[str, memoryview]
    """The long lists of a large body by field, not decoded."""


class LargeBodies:
    """Decodes large bodies in another thread, one at a time: the event loop needs the interpreter, too."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore()

    async def in_thread(self, data: Data, decode: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call `decode` directly for small data and in a thread for large data."""
        if not is_large(data):
            return decode(*args, **kwargs)
        async with self._turn:
            return await asyncio.to_thread(decode, *args, **kwargs)


def is_large(data: Data) -> bool:
    """Return whether the data is so large that it must be decoded in another thread."""
    return memoryview(data).nbytes > LARGE_BYTES


def slimmed(body: Data, form: BodyFormat) -> Slim:
    """Take the long lists out of a body, if it is large.

    Raises ProblemError (400, 422) if it is not an object, or is large in anything else.
    """
    if not is_large(body):
        return Slim(body, {})
    data = memoryview(body)
    spans = form.parts(data, MAX_FIELDS, is_object=True)
    if spans is None:
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, "body: not an object, or not complete")
    fields, members, lists = {form.encode(field): field for field in _LISTS}, Members(), dict[str, memoryview]()
    for key_begin, key_end, begin, end in spans:
        key, value = data[key_begin:key_end], data[begin:end]
        field = fields.get(bytes(key[:_LONGEST_KEY]))
        if field is not None and len(value) > _SLICE_BYTES:
            if field in lists:
                raise ProblemError.of_value(InvalidValueError(field, "two lists", "one"))
            lists[field], value = value, memoryview(form.encode([]))
        members.append((key, value))
    if len(spans) > MAX_FIELDS:
        fault = InvalidValueError("body", f"more than {MAX_FIELDS} fields", f"at most {MAX_FIELDS}")
        raise ProblemError.of_value(fault)
    if sum(len(key) + len(value) for key, value in members) > MAX_OTHER_BYTES:
        key, value = max(members, key=lambda member: len(member[0]) + len(member[1]))
        expected = f"at most {MAX_OTHER_BYTES} bytes in all fields but {', '.join(_LISTS)}"
        raise ProblemError.of_value(InvalidValueError(form.name(key), f"{len(value)} bytes", expected))
    return Slim(form.join(members), lists)


def number_slices(field: str, value: memoryview, form: BodyFormat, expected: str) -> Iterator[list[int]]:
    """Yield the integers of a long list, a few thousand at a time.

    Raises InvalidValueError for anything but a list of integers. expected: description of an element for the error.
    """
    count = 0
    for text in form.slices(field, value):
        numbers = _integers_of(text, field, count, form, expected)
        yield numbers
        count += len(numbers)


def elements(field: str, value: memoryview, form: BodyFormat, most: int) -> list[memoryview]:
    """Split a long list into its elements. Raises ProblemError for no list or more than `most`."""
    spans = form.parts(value, most, is_object=False)
    if spans is None:
        raise ProblemError.of_value(InvalidValueError(field, "something else", "array"))
    if len(spans) > most:
        raise ProblemError.of_value(InvalidValueError(f"len({field})", f"more than {most}", f"at most {most}"))
    return [value[begin:end] for _, _, begin, end in spans]


def _integers_of(text: bytes, field: str, count: int, form: BodyFormat, expected: str) -> list[int]:
    """count: number of preceding elements, for the error message."""
    try:
        return list(form.decoder(list[int]).decode(text))
    except msgspec.DecodeError as error:
        position = _POSITION.search(str(error))
        if position is None and form is JSON and not re.search(rb'["\[{]', text):
            raise ProblemError(
                400, ProblemKind.MALFORMED_BODY, f"{field}: malformed after element {count}", field
            ) from None
        if position is None:  # a nested array, or a string with a comma, was split
            raise InvalidValueError(field, f"something else after element {count}", expected) from None
        index = int(position[1])
        raise InvalidValueError(f"{field}[{count + index}]", _element(text, index, form), expected) from None


def _element(text: bytes, index: int, form: BodyFormat) -> object:
    try:
        return form.decode(text)[index]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "something else"


def _json_slices(field: str, value: memoryview) -> Iterator[bytes]:
    begin, end = 1, len(value) - 1
    if not value or value[0] != ord("["):
        raise InvalidValueError(field, bytes(value[:20]).decode(errors="replace"), "array")
    while begin <= end:
        text = bytes(value[begin : min(end, begin + _SLICE_BYTES)])
        if begin + _SLICE_BYTES < end:
            text = text[: text.rfind(b",") + 1][:-1]
        if not text.strip():  # no comma for long, or two
            raise InvalidValueError(field, "something else", "numbers")
        yield b"[" + text + b"]"
        begin += len(text) + 1


def _msgpack_slices(field: str, value: memoryview) -> Iterator[bytes]:
    data = np.frombuffer(value, np.uint8)
    left, at = msgpack_array(data)
    if left < 0:
        raise InvalidValueError(field, "something else", "array or bytes")
    while left > 0:
        count = min(left, _SLICE_NUMBERS)
        end = msgpack_after(data, at, count)
        if end - at > _MOST_BYTES_PER_NUMBER * count:
            raise InvalidValueError(field, "something else", "numbers")
        yield b"\xdc" + count.to_bytes(2, "big") + bytes(value[at:end])
        left, at = left - count, end


def _joined_json(members: Members) -> bytes:
    return b"{" + b",".join(b":".join(member) for member in members) + b"}"


def _joined_msgpack(members: Members) -> bytes:
    return b"\xdf" + len(members).to_bytes(4, "big") + b"".join(part for member in members for part in member)


JSON = BodyFormat(
    cache(msgspec.json.Decoder),
    msgspec.json.encode,
    msgspec.json.Decoder(PeerQuery[IntList]),
    msgspec.json.Decoder(RfcQuery[IntList]),
    json_parts,
    _joined_json,
    _json_slices,
)
MSGPACK = BodyFormat(
    cache(msgspec.msgpack.Decoder),
    msgspec.msgpack.encode,
    msgspec.msgpack.Decoder(PeerQuery[IntList | bytes]),
    msgspec.msgpack.Decoder(RfcQuery[IntList | bytes]),
    msgpack_parts,
    _joined_msgpack,
    _msgpack_slices,
)
