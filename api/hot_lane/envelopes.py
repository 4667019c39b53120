"""Envelopes: the part of a JSON query around its numbers.

    {"model_name":"m","token_ids":[1,2,3]}      body
    {"model_name":"m","token_ids":[     ]}      envelope

Callers send the same few envelopes again and again, so decoded envelopes are kept. A kernel reads the numbers. The
ordinary decoder reads a new envelope with random numbers in it. If it returns these numbers, the array is the prompt,
and not part of a string, of a nested object or of a field that occurs twice.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from api.decoding import codec_of
from api.hot_lane.number_kernels import read_i64, read_u32, read_u64
from api.problems import ProblemError
from api.questions import Numbers, Question, decode_question
from kv_events.limits import MAX_HASHES_PER_QUERY, MAX_TOKENS_PER_QUERY

_JSON = codec_of("application/json")
_MAX_KEPT = 1024
_MAX_BYTES = 4096
_NUM_SENTINELS = 3


class _Numbers(NamedTuple):
    """How the numbers of a field are read, and to where."""

    read: Callable[..., tuple[int, int]]
    scratch: npt.NDArray[Any]


def _numbers_of(field: str) -> _Numbers:
    if field == "token_ids":
        return _Numbers(read_u32, np.empty(MAX_TOKENS_PER_QUERY, np.uint32))
    return _Numbers(read_i64 if field == "block_hashes" else read_u64, np.empty(MAX_HASHES_PER_QUERY, np.uint64))


class Envelopes:
    """Reads the JSON queries of one route."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        """fields: names of the arrays that the route accepts as a prompt."""
        self._fields = fields
        self._array = re.compile(rb'"(%s)" ?: ?\[' % "|".join(fields).encode())
        self._numbers = {field.encode(): _numbers_of(field) for field in fields}
        self._kept: dict[bytes, Question | None] = {}

    def question(self, data: bytes, start: int) -> tuple[Question, Numbers] | None:
        """Return the question of the body data[start:] and its numbers, or None if the ordinary decoder must read it.

        The numbers are valid until the next call.
        """
        found = self._array.search(data, start)
        if found is None:
            return None
        read, scratch = self._numbers[found[1]]
        first = found.end()
        count, end = read(np.frombuffer(data, np.uint8), first, scratch)
        if end < 0 or first - start + len(data) - end > _MAX_BYTES:
            return None
        question = self._decoded(data[start:first], data[end:])
        return None if question is None else (question, scratch[:count])

    def _decoded(self, before: bytes, after: bytes) -> Question | None:
        """Return the question of an envelope. before: up to the "["; after: from the "]" on."""
        envelope = before + after
        if envelope in self._kept:
            return self._kept[envelope]
        if len(self._kept) == _MAX_KEPT:
            self._kept.clear()
        question = self._kept[envelope] = self._verified(before, after)
        return question

    def _verified(self, before: bytes, after: bytes) -> Question | None:
        sentinels = [secrets.randbits(32) for _ in range(_NUM_SENTINELS)]
        body = before + ",".join(map(str, sentinels)).encode() + after
        try:
            question, numbers = decode_question(body, _JSON, self._fields)
        except ProblemError:
            return None
        return question if numbers.tolist() == sentinels else None
