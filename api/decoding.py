"""Bodies -> request structs. Decoders are built once; whatever is wrong with a body becomes a ProblemError here."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw

from api.problems import ProblemError
from api.schemas import BatchQuery, PeerQuery, Probe, RfcQuery
from kv_events.errors import InvalidValueError

T_co = TypeVar("T_co", covariant=True)
Query: TypeAlias = PeerQuery[Any] | RfcQuery[Any]

ITEMS = {
    "token_ids": "an integer in 0 .. 4294967295",
    "seq_hashes": "an integer in 0 .. 18446744073709551615",
    "block_hashes": "an integer in -9223372036854775808 .. 9223372036854775807",
    "tier_weights": "a number in 0 .. 1000000",
}
"""What the elements of a list have to be."""

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_MISTYPED = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|(\w+)")
_NOT_FOUND = object()


class _Decoder(Protocol[T_co]):
    def decode(self, data: bytes | Raw, /) -> T_co: ...


class Codec(NamedTuple):
    """The decoders of one body format."""

    probe: _Decoder[Probe]
    peer: _Decoder[PeerQuery[Any]]
    rfc: _Decoder[RfcQuery[Any]]
    batch: _Decoder[BatchQuery]
    untyped: _Decoder[Any]


_JSON = Codec(
    msgspec.json.Decoder(Probe),
    msgspec.json.Decoder(PeerQuery[list[int]]),
    msgspec.json.Decoder(RfcQuery[list[int]]),
    msgspec.json.Decoder(BatchQuery),
    msgspec.json.Decoder(),
)
_MSGPACK = Codec(
    msgspec.msgpack.Decoder(Probe),
    msgspec.msgpack.Decoder(PeerQuery[list[int] | bytes]),
    msgspec.msgpack.Decoder(RfcQuery[list[int] | bytes]),
    msgspec.msgpack.Decoder(BatchQuery),
    msgspec.msgpack.Decoder(),
)
CONTENT_TYPES = {
    "application/json": _JSON,
    "application/msgpack": _MSGPACK,
    "application/x-msgpack": _MSGPACK,
}


def codec_of(content_type: str | None) -> Codec:
    """The decoders for a Content-Type header. Raises ProblemError (415)."""
    codec = CONTENT_TYPES.get((content_type or "").partition(";")[0].strip().lower())
    if codec is None:
        fault = InvalidValueError("Content-Type", content_type, " or ".join(CONTENT_TYPES))
        raise ProblemError.of_value(fault, 415, "content-type")
    return codec


def decode_query(data: bytes | Raw, codec: Codec) -> Query:
    """One question, in the dialect that its own fields tell. Raises ProblemError (400, 422)."""
    if _decode(codec.probe, data, codec).model_name is not UNSET:
        return _decode(codec.peer, data, codec)
    query = _decode(codec.rfc, data, codec)
    if query.model is UNSET and query.modelname is UNSET:
        raise ProblemError(422, "missing-field", "model_name: missing (or model, in the RFC's dialect)", "model_name")
    return query


def decode_batch(data: bytes, codec: Codec) -> list[Raw]:
    """The questions of a batch, not yet decoded. Raises ProblemError (400, 422)."""
    return _decode(codec.batch, data, codec).queries


_T = TypeVar("_T")


def _decode(decoder: _Decoder[_T], data: bytes | Raw, codec: Codec) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _mistyped(str(error), data, codec) from None
    except RecursionError:
        raise ProblemError(400, "malformed-body", "body: nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProblemError(400, "malformed-body", f"body: {error}") from None


def _mistyped(message: str, data: bytes | Raw, codec: Codec) -> ProblemError:
    """msgspec's message names the path; find the value there."""
    if missing := _MISSING.match(message):
        return ProblemError(422, "missing-field", f"{missing[1]}: missing", missing[1])
    fault, path = _MISTYPED.fullmatch(message).groups()  # type: ignore[union-attr]  # matches any text
    expected = ITEMS.get(path.partition("[")[0]) if path and "[" in path else None
    value = _value_at(path or "", data, codec)
    if value is _NOT_FOUND:
        tail = f", expected {expected}" if expected else ""
        return ProblemError(422, "invalid-value", f"{path or 'body'}: {fault}{tail}", path)
    said = fault.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    return ProblemError.of_value(InvalidValueError(path or "body", value, expected or said))


def _value_at(path: str, data: bytes | Raw, codec: Codec) -> object:
    try:
        value = codec.untyped.decode(data)
        for index, name in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, RecursionError):
        return _NOT_FOUND  # then msgspec's own words must do
    return value
