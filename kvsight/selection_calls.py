"""Requests that place a prompt: `calls` for the selection service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import UNSET

from kv_events.http.selection import ModelLoads, Selection
from kv_events.tokens import token_array
from kvsight.calls import Call, decode, nothing
from kvsight.prompts import Integers

_JSON = "application/json"
_BOOKED = ("selection_id", "model_name", "routing_group", "worker_id", "sequence_hashes", "isl_tokens")


def select(
    model: str,
    token_ids: Integers | None = None,
    *,
    tenant: str | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    workers: Sequence[str] | None = None,
    session: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> Call[Selection]:
    """Choose a worker for a prompt, and book nothing.

    token_ids: of the prompt. None: `more` has the prompt in another form, such as `messages`. workers: the only
    candidates. session: key of the conversation. more: further fields of POST /select, such as `explain`.
    """
    fields = {
        "model_name": model,
        "routing_group": tenant,
        "lora_name": lora_name,
        "cache_salt": cache_salt,
        "allowed_worker_ids": [workers] if isinstance(workers, str) else workers and list(workers),
        "session_id": session,
        "token_ids": None if token_ids is None else token_array(token_ids).tolist(),
        **(more or {}),
    }
    body = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    return Call("POST", "/select", partial(decode, Selection), content=body, content_type=_JSON)


def reserve(
    model: str,
    token_ids: Integers | None = None,
    *,
    tenant: str | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    workers: Sequence[str] | None = None,
    session: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> Call[Selection]:
    """Choose a worker for a prompt and book the request, until `release`. Arguments as for `select`.

    The `selection_id` of the answer names the reservation.
    """
    prompt = {"tenant": tenant, "lora_name": lora_name, "cache_salt": cache_salt}
    call = select(model, token_ids, workers=workers, session=session, more=more, **prompt)
    return replace(call, path="/select_and_reserve", may_repeat=False)


def complete(selection_id: str) -> Call[None]:
    """Note that the prefill of a reserved request is complete: its first token has come."""
    return Call("POST", f"/reservations/{quote(selection_id, '')}/prefill_complete", nothing)


def release(selection_id: str) -> Call[None]:
    """Release the reservation of a request that has ended."""
    return Call("DELETE", f"/reservations/{quote(selection_id, '')}", nothing, may_repeat=False)


def book(selection: Selection) -> Call[None]:
    """Book a request on a worker that the caller chose: a selection whose id and worker were replaced."""
    fields = {name: getattr(selection, name) for name in _BOOKED}
    body = msgspec.json.encode({name: value for name, value in fields.items() if value is not UNSET})
    return Call("POST", "/reservations", nothing, content=body, content_type=_JSON, may_repeat=False)


def loads(model: str | None = None, tenant: str | None = None) -> Call[list[ModelLoads]]:
    """What is booked on each rank, by model."""
    params = {"model_name": model, "routing_group": tenant}
    return Call("GET", "/loads", partial(decode, list[ModelLoads]), params)
