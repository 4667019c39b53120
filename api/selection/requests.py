"""Requests of the selection service: their fields, and their prompts as arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec import UNSET

from api.problems import ProblemError, ProblemKind
from api.prompts.renderer import PromptRenderer
from api.queries.body_formats import Body, BodyFormat, decode_as, slimmed
from api.queries.parsing import long_numbers, numbers_of
from kv_events.errors import InvalidValueError
from kv_events.hashing import U64Array
from kv_events.http.parsed_query import ParsedQuery, PromptArray
from kv_events.http.selection import ReserveRequest, SelectRequest

_HASH_BITS = 64
_FIRST_MESSAGES = 2  # mostly those of the system and the user

_FIELDS = ("token_ids", "block_hashes")

Request = TypeVar("Request", SelectRequest, ReserveRequest)


class Prompt(NamedTuple):
    """The prompt of a request."""

    question: ParsedQuery
    numbers: PromptArray
    """Tokens or local hashes."""
    booked: U64Array | None
    """Sequence hashes that the caller gave. None: those of the numbers are booked."""
    tokens: int | None
    """As the caller gave them."""
    degraded: str = ""
    """Why the tokens of a text are not known. Empty: they are, or there was none."""


def decoded_text(body: Body, body_format: BodyFormat) -> tuple[SelectRequest, Mapping[str, Any]]:
    """Decode a request whose prompt is text. Returns the whole body, too. Raises ProblemError.

    Without a `session_id`, the first messages are the key of the session.
    """
    given: dict[str, Any] = decode_as(dict, body, body_format)
    fields = {name: given[name] for name in SelectRequest.__struct_fields__ if name in given and name not in _FIELDS}
    fields.setdefault("model_name", given.get("model", "default"))
    fields.setdefault("session_id", _session_of(given, body_format))
    return decode_as(SelectRequest, body_format.encode(fields), body_format), given


async def rendered_prompt(request: SelectRequest, given: Mapping[str, Any], renderer: PromptRenderer) -> Prompt:
    """Let an engine make the tokens of a body with text. Raises ProblemError."""
    rendered = await renderer.render(given)
    question = replace(question_of(request, "token_ids"), media=rendered.media)
    return Prompt(question, rendered.token_ids, None, None, rendered.degraded)


def _session_of(given: Mapping[str, Any], body_format: BodyFormat) -> str | None:
    """Return a key of the conversation that a chat goes on with: its first messages."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    first = body_format.encode([given.get("system"), messages[:_FIRST_MESSAGES]])
    return hashlib.blake2b(first, digest_size=16).hexdigest()


def decoded(kind: type[Request], body: Body, body_format: BodyFormat) -> tuple[Request, Prompt]:
    """Decode a request and its prompt. Raises ProblemError."""
    rest, lists = slimmed(body, body_format)
    request = decode_as(kind, rest, body_format)
    try:
        long = {field: long_numbers(field, lists[field], body_format) for field in _FIELDS if field in lists}
        return request, _prompt_of(request, long)
    except InvalidValueError as error:
        raise ProblemError.of_value(error) from None


def _prompt_of(request: SelectRequest | ReserveRequest, long: Mapping[str, PromptArray]) -> Prompt:
    """Return the prompt of a request. long: its long lists. Raises InvalidValueError, ProblemError."""
    lists = {field: getattr(request, field, UNSET) for field in _FIELDS}
    given = {field: long.get(field, value) for field, value in lists.items() if value is not UNSET}
    booked = None if request.sequence_hashes is UNSET else _unsigned(request.sequence_hashes)
    if "token_ids" in given:
        field = "token_ids"
    elif isinstance(request, ReserveRequest) and request.worker_id is None:
        return Prompt(question_of(request, "token_ids"), np.zeros(0, np.uint32), None, None)  # `/select` got it
    elif booked is None:
        raise _missing("sequence_hashes is required without token_ids", "sequence_hashes")
    elif isinstance(request, ReserveRequest):
        return Prompt(question_of(request, "seq_hashes"), booked, booked, request.isl_tokens)
    elif "block_hashes" in given:
        field = "block_hashes"
    else:
        raise _missing("block_hashes is required without token_ids", "block_hashes")
    numbers = given[field] if isinstance(given[field], np.ndarray) else numbers_of(field, given[field])
    if field == "block_hashes" and booked is not None and len(numbers) != len(booked):
        detail = f"block_hashes length {len(numbers)} must match sequence_hashes length {len(booked)}"
        raise ProblemError(400, ProblemKind.INVALID_VALUE, detail, "block_hashes", len(numbers))
    return Prompt(question_of(request, field), numbers, booked, request.isl_tokens)


def _missing(detail: str, field: str) -> ProblemError:
    return ProblemError(400, ProblemKind.MISSING_FIELD, detail, field)


def _unsigned(hashes: list[int]) -> U64Array:
    """Return hashes, of which those with sign are negative. Raises InvalidValueError."""
    for position, each in enumerate(hashes):
        if not -(2 ** (_HASH_BITS - 1)) <= each < 2**_HASH_BITS:
            raise InvalidValueError(f"sequence_hashes[{position}]", each, "an integer of 64 bits")
    return np.array([each % 2**_HASH_BITS for each in hashes], np.uint64)


def question_of(request: SelectRequest | ReserveRequest, field: str) -> ParsedQuery:
    """Return the question of a prompt, without its numbers. field: what they are."""
    adapter, salt = request.lora_name or None, request.cache_salt or None
    question = _question(request.model_name, request.routing_group, field, adapter, salt, bool(request.is_eagle))
    media = getattr(request, "media", ())
    return replace(question, media=media) if media and field == "token_ids" else question


@lru_cache(4096)
def _question(
    model: str, tenant: str, field: str, lora_name: str | None, cache_salt: str | None, is_bigram: bool
) -> ParsedQuery:
    return ParsedQuery(model, tenant, field, lora_name, cache_salt, is_bigram)
