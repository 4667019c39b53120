"""Large JSON prompts, read by a kernel that does not hold the interpreter, so that other callers do not wait."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np

from api.decoding import Body
from api.hot_lane.envelopes import MAX_BYTES, question_of_envelope
from api.hot_lane.number_kernels import read_u32
from api.questions import Numbers, Question
from kv_events.limits import MAX_TOKENS_PER_QUERY

_TOKENS = re.compile(rb'"token_ids" ?: ?\[')


def read_large_prompt(data: Body, fields: Collection[str]) -> tuple[Question, Numbers] | None:
    """Return the question and the tokens of a JSON body, or None if the ordinary decoder must read it.

    data: all that is large in it are its tokens.
    """
    found = _TOKENS.search(data, 0, MAX_BYTES)
    if found is None:
        return None
    tokens = np.empty(MAX_TOKENS_PER_QUERY, np.uint32)
    count, end = read_u32(np.frombuffer(data, np.uint8), found.end(), tokens)
    if end < 0 or found.end() + len(data) - end > MAX_BYTES:
        return None
    question = question_of_envelope(bytes(data[: found.end()]), bytes(data[end:]), fields)
    return None if question is None else (question, tokens[:count])
