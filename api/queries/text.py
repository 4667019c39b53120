"""Queries whose prompt is text: they become queries by tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from api.problems import ProblemError
from api.prompts.bodies import ROUTES
from api.queries.body_formats import MAX_FIELDS, NUMBERS, Body, BodyFormat, is_large
from kv_events.errors import InvalidValueError
from kv_events.http.queries import PeerQuery, RfcQuery

MAX_TEXT_BYTES = 8 * 2**20
"""Largest body with text: images may be in it."""
MAX_TEXT_OBJECTS = 2**17
"""Most lists, objects and strings in such a body, keys included: the interpreter stops while they are made."""


def has_text(body: Body, form: BodyFormat) -> bool:
    """Return whether a query has text and no numbers. Raises ProblemError (422) if it is too much for text."""
    data = memoryview(body)
    names = {form.name(data[begin:end]) for begin, end, *_ in form.parts(data, MAX_FIELDS, is_object=True) or ()}
    found = not names.isdisjoint(ROUTES) and names.isdisjoint(NUMBERS)
    if found and len(body) > MAX_TEXT_BYTES:
        raise ProblemError.of_value(InvalidValueError("len(body)", len(body), f"at most {MAX_TEXT_BYTES} with text"))
    if found and is_large(body) and (number := form.count_objects(np.frombuffer(body, np.uint8))) > MAX_TEXT_OBJECTS:
        said = f"{number} lists, objects and strings"
        raise ProblemError.of_value(InvalidValueError("body", said, f"at most {MAX_TEXT_OBJECTS}"))
    return found


def without_text(given: Mapping[Any, Any], form: BodyFormat) -> bytes:
    """Return the same query about no tokens. Without `block_size` it is in Dynamo's dialect."""
    is_peer = "model_name" in given or "block_size" not in given
    fields = (PeerQuery if is_peer else RfcQuery).__struct_fields__
    query = {name: given[name] for name in fields if name in given}
    if is_peer and "model" in given:
        query.setdefault("model_name", given["model"])
    return form.encode({**query, "token_ids": []})
