"""Bodies: their formats, and their decoding into request structs. Every error of a body becomes a ProblemError.

A decoder holds the interpreter until it has finished, in any thread: decoding 24 MiB at once would block all other
callers. A kernel therefore finds the members of a large body. The long lists that a body may have are taken out, and
decoded in slices. The rest must be small.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw, inspect

from api.problems import ProblemError, ProblemKind
from api.queries.kernels.parts import (
    json_objects,
    json_parts,
    msgpack_after,
    msgpack_array,
    msgpack_objects,
    msgpack_parts,
)
from kv_events.errors import InvalidValueError
from kv_events.http.queries import MAX_QUERIES_PER_BATCH, BatchQuery, DialectFields, IntList, PeerQuery, RfcQuery

LARGE_BYTES = 2**18
"""Larger bodies are decoded in another thread."""
MAX_OTHER_BYTES = 2**19
"""Bound on all of a large body but its long lists."""
MAX_FIELDS = 1024
NUMBERS = {"token_ids": "I", "seq_hashes": "Q", "block_hash": "Q", "block_hashes": "q"}
"""Field with a list of numbers -> type code of `array`, which packs the list in C and refuses values out of range."""
_LISTS = (*NUMBERS, "queries", "decisions")

_SLICE_BYTES = 2**16
_SLICE_NUMBERS = 2**13
_MOST_BYTES_PER_NUMBER = 9  # in msgpack
_LONGEST_KEY = 256
_POSITION = re.compile(r" - at `\$\[(\d+)\]")

RANGES = {field: np.iinfo(typecode) for field, typecode in NUMBERS.items()}
ITEMS = {field: f"an integer in {each.min} .. {each.max}" for field, each in RANGES.items()} | {
    "tier_weights": "a number in 0 .. 1000000"
}
"""Expected elements of each list."""

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_MISTYPED = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|(\w+)")
_NO_CHOICE = "Invalid enum value"
_NOT_FOUND = object()
_MAX_WEIGHTS_BYTES = 4096

_P = ParamSpec("_P")
_T = TypeVar("_T")
Body: TypeAlias = bytes | bytearray
Data: TypeAlias = Body | Raw | memoryview
"""A body, or a part of one that is not decoded yet."""
Members: TypeAlias = list[tuple[memoryview, memoryview]]
"""Keys and values."""
Query: TypeAlias = PeerQuery[Any] | RfcQuery[Any]
Decoder: TypeAlias = msgspec.json.Decoder[_T] | msgspec.msgpack.Decoder[_T]


class BodyFormat(NamedTuple):
    """A format of bodies."""

    decoder: Callable[[Any], Decoder[Any]]
    """Returns the decoder of a type, which is built once."""
    encode: Callable[[Any], bytes]
    peer: Decoder[PeerQuery[Any]]
    rfc: Decoder[RfcQuery[Any]]
    find_parts: Callable[..., int]
    """See `json_parts`."""
    count_objects: Callable[..., int]
    """See `json_objects`."""
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


def slimmed(body: Data, form: BodyFormat) -> tuple[Data, dict[str, memoryview]]:
    """Take the long lists out of a body, if it is large. Return the rest, with empty lists, and the lists by field.

    Nothing is decoded. Raises ProblemError (400, 422) if the body is not an object, or is large in anything else.
    """
    if not is_large(body):
        return body, {}
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
    return form.join(members), lists


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
    json_objects,
    _joined_json,
    _json_slices,
)
MSGPACK = BodyFormat(
    cache(msgspec.msgpack.Decoder),
    msgspec.msgpack.encode,
    msgspec.msgpack.Decoder(PeerQuery[IntList | bytes]),
    msgspec.msgpack.Decoder(RfcQuery[IntList | bytes]),
    msgpack_parts,
    msgpack_objects,
    _joined_msgpack,
    _msgpack_slices,
)
CONTENT_TYPES = {
    "application/json": JSON,
    "application/msgpack": MSGPACK,
    "application/x-msgpack": MSGPACK,
}


def format_of(content_type: str | None) -> BodyFormat:
    """Return the decoders for a Content-Type header. Raises ProblemError (415)."""
    body_format = CONTENT_TYPES.get((content_type or "").partition(";")[0].strip().lower())
    if body_format is None:
        fault = InvalidValueError("Content-Type", content_type, " or ".join(CONTENT_TYPES))
        raise ProblemError.of_value(fault, 415, ProblemKind.CONTENT_TYPE)
    return body_format


def decode_query(data: Data, body_format: BodyFormat) -> Query:
    """Decode one question, in the dialect that its fields select. Raises ProblemError (400, 422)."""
    probe = decode_as(DialectFields, data, body_format)
    if isinstance(probe.tier_weights, Raw) and memoryview(probe.tier_weights).nbytes > _MAX_WEIGHTS_BYTES:
        expected = f"at most {_MAX_WEIGHTS_BYTES} bytes"
        raise ProblemError.of_value(InvalidValueError("tier_weights", "a value that is longer", expected))
    if probe.model_name is not UNSET:
        return _decode(body_format.peer, data, body_format)
    if probe.model is UNSET and probe.modelname is UNSET:  # before what the RFC's dialect needs besides
        raise ProblemError(
            422, ProblemKind.MISSING_FIELD, "model_name: missing (or model, in the RFC's dialect)", "model_name"
        )
    return _decode(body_format.rfc, data, body_format)


def decode_query_batch(data: Body, body_format: BodyFormat) -> Sequence[Data]:
    """Return the questions of a batch, not yet decoded. Raises ProblemError (400, 422)."""
    rest, lists = slimmed(data, body_format)
    batch = decode_as(BatchQuery, rest, body_format)
    if "queries" in lists:
        return elements("queries", lists["queries"], body_format, MAX_QUERIES_PER_BATCH)
    return batch.queries


def decode_as(kind: type[_T], data: Data, body_format: BodyFormat) -> _T:
    """Decode a small body into a struct. Raises ProblemError (400, 422)."""
    decoder: Decoder[_T] = body_format.decoder(kind)
    return _decode(decoder, data, body_format)


def _decode(decoder: Decoder[_T], data: Data, body_format: BodyFormat) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _mistyped(str(error), data, body_format, decoder.type) from None
    except RecursionError:
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, "body: nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fault = error if memoryview(data).nbytes else "it is empty"
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, f"body: {fault}") from None


def _mistyped(message: str, data: Data, body_format: BodyFormat, kind: Any) -> ProblemError:
    """Find the value at the path that msgspec's message names. kind: the type that the body should have."""
    fault, path = _MISTYPED.fullmatch(message).groups()  # type: ignore[union-attr]  # matches any text
    if missing := _MISSING.match(fault):
        field = f"{path}.{missing[1]}" if path else missing[1]
        return ProblemError(422, ProblemKind.MISSING_FIELD, f"{field}: missing", field)
    expected = ITEMS.get(path.partition("[")[0]) if path and "[" in path else None
    value = _value_at(path or "", data, body_format)
    if value is _NOT_FOUND:
        tail = f", expected {expected}" if expected else ""
        return ProblemError(422, ProblemKind.INVALID_VALUE, f"{path or 'body'}: {fault}{tail}", path)
    said = fault.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    if " regex " in said:  # of `URL_PATTERN`
        said = "http://HOST:PORT"
    if said.startswith(_NO_CHOICE):
        said = f"one of {', '.join(map(repr, _choices(kind, path or '')))}"
    return ProblemError.of_value(InvalidValueError(path or "body", value, expected or said))


def _choices(kind: Any, path: str) -> list[Any]:
    """Return the values that a field of a struct accepts."""
    fields = {each.encode_name: each.type for each in getattr(inspect.type_info(kind), "fields", ())}
    own = fields.get(path)
    types = own.types if isinstance(own, inspect.UnionType) else (own,)
    return [value for each in types if isinstance(each, inspect.LiteralType) for value in each.values]


def _value_at(path: str, data: Data, body_format: BodyFormat) -> object:
    try:
        value = body_format.decode(data)
        for index, name in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, RecursionError):
        return _NOT_FOUND  # msgspec's own message remains
    return value
