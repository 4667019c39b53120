"""Templates: the part of a JSON query around its numbers.

    {"model_name":"m","token_ids":[1,2,3]}      body
    {"model_name":"m","token_ids":[     ]}      template

Callers send the same few templates again and again, so decoded templates are kept. msgspec decodes a new one with
random numbers in it. If it returns these numbers, the array is the prompt, and not part of a string, of a nested object
or of a field that occurs twice. A kernel reads the real numbers.
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from api.fast.kernels.connections import MAX_TEMPLATE_BYTES
from api.problems import ProblemError

_MAX_KEPT = 4096

_SENTINELS = [secrets.randbits(32) for _ in range(3)]
"""Numbers that no client can know."""

_Value = TypeVar("_Value")
Question = TypeVar("Question")

Decode: TypeAlias = Callable[[bytes], tuple[Question, Iterable[int]]]
"""Returns the question of a body and the numbers of its prompt. Raises ProblemError."""


class BodyTemplate(NamedTuple, Generic[Question]):
    """What a template asks, and what surrounds the numbers of a body."""

    question: Question
    before: bytes
    """What comes before the numbers, up to the "["."""
    after: bytes
    """What must follow the numbers, from the "]" on."""


class TemplateCache(Generic[Question]):
    """Recognises the JSON bodies of one route."""

    def __init__(self, fields: Collection[str], decode: Decode[Question]) -> None:
        """fields: names of the arrays that the route accepts as a prompt."""
        self._decode = decode
        self._array = re.compile(rb'"(?:%s)" ?: ?\[' % "|".join(fields).encode())
        self._last: dict[bytes, BodyTemplate[Question]] = {}  # by the text before the numbers, the newest one
        self._kept: dict[bytes, Question | None] = {}

    def expected(self, data: bytes, start: int) -> BodyTemplate[Question] | None:
        """Return the template that the body data[start:] is likely to have, judged by its beginning and its end."""
        last = self._last.get(data[start : data.find(b"[", start) + 1])
        return last if last is not None and data.endswith(last.after) else None

    def read(self, data: bytes, start: int) -> BodyTemplate[Question] | None:
        """Return the template of the body data[start:], or None if msgspec must decode it."""
        found = self._array.search(data, start)
        if found is None:
            return None
        first, end = found.end(), data.find(b"]", found.end())
        if end < 0 or first - start + len(data) - end > MAX_TEMPLATE_BYTES:
            return None
        before, after = data[start:first], data[end:]
        question = self._decoded(before, after)
        if question is None:
            return None
        template = BodyTemplate(question, before, after)
        if before.index(b"[") == len(before) - 1:
            _keep(self._last, before, template)
        return template

    def _decoded(self, before: bytes, after: bytes) -> Question | None:
        """Return the question of a template. before: up to the "["; after: from the "]" on."""
        template = before + after
        if template not in self._kept:
            _keep(self._kept, template, self._question(before, after))
        return self._kept[template]

    def _question(self, before: bytes, after: bytes) -> Question | None:
        """Return the question of a new template, or None if msgspec must decode bodies that have it."""
        try:
            question, numbers = self._decode(before + ",".join(map(str, _SENTINELS)).encode() + after)
        except ProblemError:
            return None
        return question if list(numbers) == _SENTINELS else None


def _keep(kept: dict[bytes, _Value], key: bytes, value: _Value) -> None:
    if len(kept) == _MAX_KEPT:
        kept.clear()
    kept[key] = value
