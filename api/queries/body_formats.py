"""Decoding of bodies into request structs. Decoders are built once; every error of a body becomes a ProblemError."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw

from api.problems import ProblemError, ProblemKind
from api.queries.large_bodies import JSON, MSGPACK, Format, elements, slimmed
from kv_events.errors import InvalidValueError
from kv_events.http.queries import MAX_QUERIES_PER_BATCH, BatchQuery, DialectFields, IntList, PeerQuery, RfcQuery

T_co = TypeVar("T_co", covariant=True)
_T = TypeVar("_T")
Body: TypeAlias = bytes | bytearray
Data: TypeAlias = Body | Raw | memoryview
"""A body, or a part of one that is not decoded yet."""
Query: TypeAlias = PeerQuery[Any] | RfcQuery[Any]

ITEMS = {
    "token_ids": "an integer in 0 .. 4294967295",
    "seq_hashes": "an integer in 0 .. 18446744073709551615",
    "block_hash": "an integer in 0 .. 18446744073709551615",
    "block_hashes": "an integer in -9223372036854775808 .. 9223372036854775807",
    "tier_weights": "a number in 0 .. 1000000",
}
"""Expected elements of each list."""

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_MISTYPED = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|(\w+)")
_NOT_FOUND = object()
_MAX_WEIGHTS_BYTES = 4096


class _Decoder(Protocol[T_co]):
    def decode(self, data: Data, /) -> T_co: ...


class BodyFormat(NamedTuple):
    """The decoders of one body format."""

    probe: _Decoder[DialectFields]
    peer: _Decoder[PeerQuery[Any]]
    rfc: _Decoder[RfcQuery[Any]]
    batch: _Decoder[BatchQuery]
    untyped: _Decoder[Any]
    """Decodes without types, to find the value that a typed decoder refused."""
    build: Callable[[type[Any]], _Decoder[Any]]
    """Function that returns a decoder of another type."""
    form: Format


_JSON = BodyFormat(
    msgspec.json.Decoder(DialectFields),
    msgspec.json.Decoder(PeerQuery[IntList]),
    msgspec.json.Decoder(RfcQuery[IntList]),
    msgspec.json.Decoder(BatchQuery),
    msgspec.json.Decoder(),
    msgspec.json.Decoder,
    JSON,
)
_MSGPACK = BodyFormat(
    msgspec.msgpack.Decoder(DialectFields),
    msgspec.msgpack.Decoder(PeerQuery[IntList | bytes]),
    msgspec.msgpack.Decoder(RfcQuery[IntList | bytes]),
    msgspec.msgpack.Decoder(BatchQuery),
    msgspec.msgpack.Decoder(),
    msgspec.msgpack.Decoder,
    MSGPACK,
)
CONTENT_TYPES = {
    "application/json": _JSON,
    "application/msgpack": _MSGPACK,
    "application/x-msgpack": _MSGPACK,
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
    probe = _decode(body_format.probe, data, body_format)
    if isinstance(probe.tier_weights, Raw) and memoryview(probe.tier_weights).nbytes > _MAX_WEIGHTS_BYTES:
        expected = f"at most {_MAX_WEIGHTS_BYTES} bytes"
        raise ProblemError.of_value(InvalidValueError("tier_weights", "a value that is longer", expected))
    if probe.model_name is not UNSET:
        return _decode(body_format.peer, data, body_format)
    query = _decode(body_format.rfc, data, body_format)
    if query.model is UNSET and query.modelname is UNSET:
        raise ProblemError(
            422, ProblemKind.MISSING_FIELD, "model_name: missing (or model, in the RFC's dialect)", "model_name"
        )
    return query


def decode_query_batch(data: Body, body_format: BodyFormat) -> Sequence[Data]:
    """Return the questions of a batch, not yet decoded. Raises ProblemError (400, 422)."""
    rest, lists = slimmed(data, body_format.form)
    batch = _decode(body_format.batch, rest, body_format)
    if "queries" in lists:
        return elements("queries", lists["queries"], body_format.form, MAX_QUERIES_PER_BATCH)
    return batch.queries


def decode_as(kind: type[_T], data: Data, body_format: BodyFormat) -> _T:
    """Decode a small body of an infrequent request into a struct. Raises ProblemError (400, 422)."""
    decoder: _Decoder[_T] = body_format.build(kind)
    return _decode(decoder, data, body_format)


def _decode(decoder: _Decoder[_T], data: Data, body_format: BodyFormat) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _mistyped(str(error), data, body_format) from None
    except RecursionError:
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, "body: nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, f"body: {error}") from None


def _mistyped(message: str, data: Data, body_format: BodyFormat) -> ProblemError:
    """Find the value at the path that msgspec's message names."""
    if missing := _MISSING.match(message):
        return ProblemError(422, ProblemKind.MISSING_FIELD, f"{missing[1]}: missing", missing[1])
    fault, path = _MISTYPED.fullmatch(message).groups()  # type: ignore[union-attr]  # matches any text
    expected = ITEMS.get(path.partition("[")[0]) if path and "[" in path else None
    value = _value_at(path or "", data, body_format)
    if value is _NOT_FOUND:
        tail = f", expected {expected}" if expected else ""
        return ProblemError(422, ProblemKind.INVALID_VALUE, f"{path or 'body'}: {fault}{tail}", path)
    said = fault.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    return ProblemError.of_value(InvalidValueError(path or "body", value, expected or said))


def _value_at(path: str, data: Data, body_format: BodyFormat) -> object:
    try:
        value = body_format.untyped.decode(data)
        for index, name in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, RecursionError):
        return _NOT_FOUND  # msgspec's own message remains
    return value
