"""Conversion of requests of both dialects into one form of question, with checked numbers in arrays."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection
from typing import Any

import numpy as np
from msgspec import UNSET

from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import (
    ITEMS,
    JSON,
    NUMBERS,
    RANGES,
    BodyFormat,
    Data,
    Query,
    decode_query,
    number_slices,
    slimmed,
)
from api.queries.kernels.numbers import read_tokens
from kv_events.errors import InvalidValueError
from kv_events.http.parsed_query import ParsedQuery, PromptArray, Weights
from kv_events.http.queries import PeerQuery, TierWeights
from kv_events.limits import MAX_HASHES_PER_QUERY, MAX_TOKENS_PER_QUERY
from kv_events.schema import TIERS
from kv_events.streams import DEFAULT_TENANT

_HIGHEST_WEIGHT = 1e6


BY_TOKENS = ("token_ids",)
BY_HASH = ("seq_hashes", "block_hashes", "block_hash")
BY_ANY = BY_TOKENS + BY_HASH
_PACKED = (0xC4, 0xC5, 0xC6)
"""First byte of bytes in msgpack."""


def decode_question(data: Data, body_format: BodyFormat, fields: Collection[str]) -> tuple[ParsedQuery, PromptArray]:
    """Decode one query in either dialect. See `question_of`. Raises ProblemError."""
    rest, lists = slimmed(data, body_format)
    question, numbers = question_of(decode_query(rest, body_format), fields)
    if question.field in lists:
        try:
            numbers = long_numbers(question.field, lists[question.field], body_format)
        except InvalidValueError as error:
            raise ProblemError.of_value(error) from None
    if question.field == "token_ids" and (covered := sum(span.length for span in question.media)) > len(numbers):
        expected = f"at most the {len(numbers)} of the prompt"
        raise ProblemError.of_value(InvalidValueError("media", f"{covered} tokens", expected))
    return question, numbers


def question_of(query: Query, fields: Collection[str]) -> tuple[ParsedQuery, PromptArray]:
    """Check a request. Return the question and the numbers of its prompt, uint32[n] tokens or uint64[n] hashes.

    fields: the fields in which this route accepts a prompt. Raises ProblemError.
    """
    lora_name, salt = query.lora_name, query.cache_salt
    of_rfc: dict[str, Any] = {}
    if isinstance(query, PeerQuery):
        model, tenant = query.model_name, query.routing_group
    else:
        salt = salt or query.additionalsalt or query.additional_salt
        named = query.modelname if query.model is UNSET else query.model
        assert isinstance(named, str)  # checked by the decoder
        model, tenant = named, query.tenant_id
        if lora_name is None and query.lora_id:  # the bridge uses the number as the name if the engine sends no name
            lora_name = str(query.lora_id)
        instance = None if query.instance_id is None else str(query.instance_id)
        of_rfc = {
            "is_peer": False,
            "block_size": query.block_size,
            "instance": instance,
            "is_detailed": bool(query.hit_detail),
        }
    field = _prompt_field(query, fields)
    if field == "block_hashes" and salt:
        detail = "cache_salt: not accepted with block_hashes, which already contain it; leave it out"
        raise ProblemError(400, ProblemKind.SALT_WITH_LOCAL_HASHES, detail, "cache_salt")
    try:
        numbers = numbers_of(field, getattr(query, field))
        weights = None if query.tier_weights is None else _weights(query.tier_weights)
    except InvalidValueError as error:
        raise ProblemError.of_value(error) from None
    question = ParsedQuery(
        model=model,
        tenant=tenant or DEFAULT_TENANT,
        field=field,
        lora_name=lora_name,
        cache_salt=salt,
        is_bigram=bool(query.is_eagle),
        media=query.media,
        weights=weights,
        **of_rfc,
    )
    return question, numbers


def _prompt_field(query: Query, fields: Collection[str]) -> str:
    known = [field for field in fields if field in query.__struct_fields__]
    given = [field for field in known if getattr(query, field) is not UNSET]
    if not given:
        raise ProblemError(422, ProblemKind.MISSING_FIELD, f"{' or '.join(known)}: missing", "|".join(known))
    if len(given) > 1:
        raise ProblemError(
            422, ProblemKind.INVALID_VALUE, f"{' and '.join(given)}: only one of them may be given", given[1]
        )
    return given[0]


def numbers_of(field: str, value: list[int] | bytes) -> PromptArray:
    """Pack a list of numbers. Raises InvalidValueError naming the first element out of range."""
    dtype = _dtype(field)
    if isinstance(value, list):
        _check_count(field, len(value))
        return np.frombuffer(_packed(field, value), dtype)
    if len(value) % dtype.itemsize:
        raise InvalidValueError(field, f"{len(value)} bytes", f"a multiple of {dtype.itemsize} bytes")
    _check_count(field, len(value) // dtype.itemsize)
    return np.frombuffer(value, dtype)


def _check_count(field: str, count: int) -> None:
    most = MAX_TOKENS_PER_QUERY if field in BY_TOKENS else MAX_HASHES_PER_QUERY
    if count > most:
        raise InvalidValueError(f"len({field})", count, f"at most {most}")


def _dtype(field: str) -> np.dtype[Any]:
    """Return the numpy type of packed numbers. Signed hashes are taken as unsigned ones."""
    return np.dtype("<u4" if field in BY_TOKENS else "<u8")


def _packed(field: str, numbers: list[int], first: int = 0) -> array[int]:
    """first: position of the first number in the whole list."""
    try:
        return array(NUMBERS[field], numbers)
    except OverflowError:
        bounds = RANGES[field]
        position = next(i for i, number in enumerate(numbers) if not bounds.min <= number <= bounds.max)
        raise InvalidValueError(f"{field}[{first + position}]", numbers[position], ITEMS[field]) from None


def long_numbers(field: str, value: memoryview, form: BodyFormat) -> PromptArray:
    """Decode a long list, which is not decoded at all yet. Raises InvalidValueError.

    Most tokens are read without the interpreter.
    """
    if field == "token_ids" and form is JSON and value[0] == ord("["):
        tokens = np.empty(MAX_TOKENS_PER_QUERY, np.uint32)
        count, end = read_tokens(np.frombuffer(value, np.uint8), 1, tokens)
        if end == len(value) - 1:
            return tokens[:count]
    if form is not JSON and value[0] in _PACKED:
        return numbers_of(field, form.decode(value))
    packed = array(NUMBERS[field])
    for numbers in number_slices(field, value, form, ITEMS[field]):
        packed += _packed(field, numbers, len(packed))
        _check_count(field, len(packed))
    return np.frombuffer(packed, _dtype(field))


def _weights(given: TierWeights) -> Weights:
    """Return the weights in the order of the tiers. A missing tier has weight 0. Raises InvalidValueError."""
    if isinstance(given, dict):
        by_tier = {name.lower(): weight for name, weight in given.items()}
        if unknown := by_tier.keys() - set(TIERS):
            raise InvalidValueError("tier_weights", min(unknown), f"names among {', '.join(TIERS)}")
        weights = tuple(by_tier.get(tier, 0.0) for tier in TIERS)
    else:
        weights = given
    for tier, weight in zip(TIERS, weights, strict=True):
        if not (math.isfinite(weight) and 0 <= weight <= _HIGHEST_WEIGHT):
            raise InvalidValueError(f"tier_weights.{tier}", weight, ITEMS["tier_weights"])
    return tuple(weight + 0.0 for weight in weights)  # a zero without a sign
