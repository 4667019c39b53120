"""Templates: the part of a JSON query around its numbers.

    {"model_name":"m","token_ids":[1,2,3],"selection_id":"a-17"}      body
    {"model_name":"m","token_ids":[     ],"selection_id":"    "}      template

Callers send the same few templates again and again, so decoded templates are kept. msgspec decodes a new one with
random numbers and a random name in it. If it returns them, the array is the prompt, and not part of a string, of a
nested object or of a field that occurs twice, and so is the name. A kernel reads the real numbers.
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from api.fast.kernels.recognise import MAX_TEMPLATE_BYTES, NAME_PATTERN
from api.problems import ProblemError

_MAX_KEPT = 4096

_SENTINELS = [secrets.randbits(32) for _ in range(3)]
_SENTINEL_NAME = secrets.token_hex(16)
"""Numbers and a name that no client can know."""

_Key = TypeVar("_Key")
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
    pieces: tuple[bytes, bytes, bytes, bytes]
    """`before` up to the name of the request and after it, and `after` likewise. The second piece of each is empty if
    the name is not there.
    """


class TemplateCache(Generic[Question]):
    """Recognises the JSON bodies of one route."""

    def __init__(self, fields: Collection[str], decode: Decode[Question]) -> None:
        """fields: names of the arrays that the route accepts as a prompt."""
        self._decode = decode
        self._array = re.compile(rb'"(?:%s)" ?: ?\[' % "|".join(fields).encode())
        self._name = re.compile(NAME_PATTERN)
        self._last: dict[bytes, BodyTemplate[Question]] = {}  # by the text before the numbers, the newest one
        self._kept: dict[tuple[bytes, ...], Question | None] = {}  # by the pieces

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
        name, pieces = self._split(before, after)
        if pieces not in self._kept:
            _keep(self._kept, pieces, self._question(*pieces))
        question = self._kept[pieces]
        if question is None:
            return None
        if name:
            named = msgspec.structs.replace(cast(msgspec.Struct, question), selection_id=name.decode())
            question = cast(Question, named)
        template = BodyTemplate(question, before, after, pieces)
        if not name and before.index(b"[") == len(before) - 1:
            _keep(self._last, before, template)
        return template

    def _split(self, before: bytes, after: bytes) -> tuple[bytes, tuple[bytes, bytes, bytes, bytes]]:
        """Return the name of a request, empty if a kernel cannot read it, and the pieces of its template."""
        if found := self._name.search(before):
            return found[1], (before[: found.start(1)], before[found.end(1) :], after, b"")
        if found := self._name.search(after):
            return found[1], (before, b"", after[: found.start(1)], after[found.end(1) :])
        return b"", (before, b"", after, b"")

    def _question(self, before: bytes, before_rest: bytes, after: bytes, after_rest: bytes) -> Question | None:
        """Return the question of a new template, or None if msgspec must decode bodies that have it."""
        name, numbers = _SENTINEL_NAME.encode(), ",".join(map(str, _SENTINELS)).encode()
        body = before + (name + before_rest if before_rest else b"") + numbers + after
        try:
            question, found = self._decode(body + (name + after_rest if after_rest else b""))
        except ProblemError:
            return None
        is_named = bool(before_rest or after_rest)
        if list(found) != _SENTINELS or (is_named and getattr(question, "selection_id", None) != _SENTINEL_NAME):
            return None
        return question


def _keep(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    if len(kept) == _MAX_KEPT:
        kept.clear()
    kept[key] = value
