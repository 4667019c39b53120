"""Queries whose prompt is text: they become queries by tokens."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from api.problems import ProblemError
from api.prompts.bodies import ROUTES, Rendered
from api.queries.body_formats import MAX_FIELDS, NUMBERS, Body, BodyFormat
from kv_events.errors import InvalidValueError
from kv_events.http.queries import PeerQuery, RfcQuery

MAX_TEXT_BYTES = 8 * 2**20
"""Largest body with text: images may be in it."""
TokensOf: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[Rendered]]
"""Returns the tokens of a body. Raises ProblemError if they are not known."""


def has_text(body: Body, form: BodyFormat) -> bool:
    """Return whether a query has text and no numbers. Raises ProblemError (422) if it is too large for text."""
    data = memoryview(body)
    names = {form.name(data[begin:end]) for begin, end, *_ in form.parts(data, MAX_FIELDS, is_object=True) or ()}
    found = not names.isdisjoint(ROUTES) and names.isdisjoint(NUMBERS)
    if found and len(body) > MAX_TEXT_BYTES:
        raise ProblemError.of_value(InvalidValueError("len(body)", len(body), f"at most {MAX_TEXT_BYTES} with text"))
    return found


def without_text(given: Mapping[Any, Any], form: BodyFormat) -> bytes:
    """Return the same query about no tokens. Without `block_size` it is in Dynamo's dialect."""
    is_peer = "model_name" in given or "block_size" not in given
    fields = (PeerQuery if is_peer else RfcQuery).__struct_fields__
    query = {name: given[name] for name in fields if name in given}
    if is_peer and "model" in given:
        query.setdefault("model_name", given["model"])
    return form.encode({**query, "token_ids": []})
