"""Decoding of bodies into request structs. Every error of a body becomes a ProblemError."""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, inspect

from api.problems import ProblemError, ProblemKind
from api.queries.large_bodies import JSON, MSGPACK, Body, BodyFormat, Data, Decoder, elements, slimmed
from kv_events.errors import InvalidValueError
from kv_events.http.queries import MAX_QUERIES_PER_BATCH, BatchQuery, DialectFields, PeerQuery, RfcQuery
from kv_events.limits import MAX_TOKEN_ID

_T = TypeVar("_T")
Query: TypeAlias = PeerQuery[Any] | RfcQuery[Any]

RANGES = {
    "token_ids": (0, MAX_TOKEN_ID),
    "seq_hashes": (0, 2**64 - 1),
    "block_hash": (0, 2**64 - 1),
    "block_hashes": (-(2**63), 2**63 - 1),
}
"""The lowest and the highest number in each list."""
ITEMS = {field: f"an integer in {low} .. {high}" for field, (low, high) in RANGES.items()} | {
    "tier_weights": "a number in 0 .. 1000000"
}
"""Expected elements of each list."""

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_MISTYPED = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|(\w+)")
_NO_CHOICE = "Invalid enum value"
_NOT_FOUND = object()
_MAX_WEIGHTS_BYTES = 4096

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
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, f"body: {error}") from None


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
