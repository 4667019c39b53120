"""Templates: the part of a query around its numbers, and of a whole request, by which kernels recognise it.

    {"model_name":"m","token_ids":[1,2,3],"selection_id":"a-17"}      body
    {"model_name":"m","token_ids":[     ],"selection_id":"    "}      template

Callers send the same few templates again and again, so decoded templates are kept. msgspec decodes a new one with
random numbers and a random name in it. If it returns them, the array is the prompt, and not part of a string, of a
nested object or of a field that occurs twice, and so is the name. A kernel reads the real numbers. Bodies in msgpack
have templates, too, if their numbers are bytes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from api.fast.heads import Head, request_line
from api.fast.kernels import recognise
from api.fast.kernels.connections import MAX_REQUEST_BYTES
from api.fast.kernels.text import MARGIN, Texts
from api.problems import ProblemError
from kv_events.kernels.bundles import pin

_MAX_KEPT, _TEXT_BYTES = 2**12, 2**20
"""Bounds on the templates that are kept, and on the text of those of a table. What is full is cleared."""
_AUTHORIZATION = 3
_SENTINEL_NAME = secrets.token_hex(16)
_SENTINEL_BYTES = secrets.token_bytes(24)
"""A name and numbers that no client can know."""
_AS_TOKENS, _AS_HASHES = (np.frombuffer(_SENTINEL_BYTES, dtype).tolist() for dtype in ("<u4", "<u8"))
_JSON_SENTINELS = ",".join(map(str, _AS_TOKENS)).encode(), (_AS_TOKENS,)
_PACKED_SENTINELS = msgspec.msgpack.encode(_SENTINEL_BYTES), (_AS_TOKENS, _AS_HASHES)
"""Texts of the numbers, and as what they may be read."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
Question = TypeVar("Question")


class BodyTemplate(NamedTuple, Generic[Question]):
    """What a template asks, and what surrounds the numbers of a body."""

    question: Question
    before: bytes
    """What comes before the numbers: up to the "[", or up to the head of the bytes."""
    after: bytes
    """What must follow the numbers: from the "]" on, or from the end of the bytes."""
    pieces: tuple[bytes, bytes, bytes, bytes]
    """`before` up to the name of the request and after it, and `after` likewise. The second piece of each is empty if
    the name is not there.
    """


class TemplateCache(Generic[Question]):
    """Recognises the bodies of one route in one format."""

    def __init__(
        self,
        fields: Collection[str],
        decode: Callable[[bytes], tuple[Question, Iterable[int]]],
        *,
        is_packed: bool = False,
    ) -> None:
        """fields: names of the arrays that the route accepts as a prompt. decode: returns the question of a body and
        the numbers of its prompt, or raises ProblemError. is_packed: the bodies are msgpack and the numbers bytes.
        """
        self._decode = decode
        array = re.compile(rb'"(?:%s)" ?: ?\[' % "|".join(fields).encode())
        self._find = recognise.packed_numbers if is_packed else partial(_json_numbers, array)
        self._sentinels = _PACKED_SENTINELS if is_packed else _JSON_SENTINELS
        self._is_packed = is_packed
        self._seen: set[int] = set()  # hashes of the pieces of packed bodies
        self._name = re.compile(recognise.NAME_PATTERN)
        self._last: dict[bytes, BodyTemplate[Question]] = {}  # by the text before the numbers, the newest one
        self._kept: dict[tuple[bytes, ...], Question | None] = {}  # by the pieces

    def expected(self, data: bytes, start: int) -> BodyTemplate[Question] | None:
        """Return the template that the JSON body data[start:] probably has, judged by its beginning and its end."""
        last = self._last.get(data[start : data.find(b"[", start) + 1])
        return last if last is not None and data.endswith(last.after) else None

    def read(self, data: bytes, start: int) -> BodyTemplate[Question] | None:
        """Return the template of the body data[start:], or None if msgspec must decode it."""
        stop, _, end = self._find(data, start, len(data))
        if stop < 0 or stop - start + len(data) - end > recognise.MAX_TEMPLATE_BYTES:
            return None
        before, after = data[start:stop], data[end:]
        name, pieces = self._split(before, after)
        if pieces not in self._kept:
            if self._is_packed and not self._was_seen(hash(pieces)):
                return None
            _keep(self._kept, pieces, self._question(*pieces))
        question = self._kept[pieces]
        if question is None:
            return None
        if name:
            named = msgspec.structs.replace(cast(msgspec.Struct, question), selection_id=name.decode())
            question = cast(Question, named)
        template = BodyTemplate(question, before, after, pieces)
        if not name and before.find(b"[") == len(before) - 1:
            _keep(self._last, before, template)
        return template

    def _was_seen(self, pieces: int) -> bool:
        """Return whether a packed body had these pieces before. Only kernels need a template of it, and one that never
        comes again would cost more than it saves.
        """
        if len(self._seen) == _MAX_KEPT:
            self._seen.clear()
        was_seen = pieces in self._seen
        self._seen.add(pieces)
        return was_seen

    def _split(self, before: bytes, after: bytes) -> tuple[bytes, tuple[bytes, bytes, bytes, bytes]]:
        """Return the name of a request, empty if a kernel cannot read it, and the pieces of its template."""
        if found := self._name.search(before):
            return found[1], (before[: found.start(1)], before[found.end(1) :], after, b"")
        if found := self._name.search(after):
            return found[1], (before, b"", after[: found.start(1)], after[found.end(1) :])
        return b"", (before, b"", after, b"")

    def _question(self, before: bytes, before_rest: bytes, after: bytes, after_rest: bytes) -> Question | None:
        """Return the question of a new template, or None if msgspec must decode bodies that have it."""
        name, (numbers, readings) = _SENTINEL_NAME.encode(), self._sentinels
        body = before + (name + before_rest if before_rest else b"") + numbers + after
        try:
            question, found = self._decode(body + (name + after_rest if after_rest else b""))
        except ProblemError:
            return None
        is_named = bool(before_rest or after_rest)
        if list(found) not in readings or (is_named and getattr(question, "selection_id", None) != _SENTINEL_NAME):
            return None
        return question


def _json_numbers(array: re.Pattern[bytes], data: bytes, start: int, _stop: int) -> tuple[int, int, int]:
    """Find the numbers of a JSON body, see `recognise.packed_numbers`: the first two indices are equal.

    array: pattern of what comes before them.
    """
    found = array.search(data, start)
    end = -1 if found is None else data.find(b"]", found.end())
    return (-1, -1, -1) if found is None or end < 0 else (found.end(), found.end(), end)


def _keep(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    if len(kept) == _MAX_KEPT:
        kept.clear()
    kept[key] = value


class RequestTemplate(NamedTuple):
    """What requests have in common that ask the same about different prompts."""

    path: str
    """Empty: the requests have no body."""
    content_type: str
    """`Caller.content_type`."""
    question: Any
    """As the route of the path decodes it. Without a body: the last of `Head.parameters`."""
    pieces: tuple[bytes, ...]
    """Request line; values of Content-Type, Host and Authorization, the last one empty if any is accepted; the body
    around the numbers and the name, see `BodyTemplate.pieces`."""
    generation: int
    """`HeadReader.generation` when the head was accepted."""

    @classmethod
    def of(cls, head: Head, template: BodyTemplate[Any], generation: int) -> RequestTemplate | None:
        """Return the template of a request, or None if a kernel cannot read such requests."""
        if head.content_length > MAX_REQUEST_BYTES:
            return None
        if max(template.before.count(b"["), template.after.count(b"]")) > recognise.MOST_ARRAYS:
            return None
        pieces = (request_line(head.path), *head.caller.lines, *template.pieces)
        found = cls(head.path, head.caller.content_type, template.question, pieces, generation)
        has_odd_name = getattr(template.question, "selection_id", None) and not found.is_named
        return None if has_odd_name else found  # a kernel would not see the name, and would give another one

    @classmethod
    def without_body(cls, head: Head, generation: int) -> RequestTemplate:
        """Return the template of requests without a body."""
        (_, host, token), (*_, step) = head.caller.lines, head.parameters
        rest = b"%b HTTP/1.1\r\n" % (b"" if step is None else b"/" + step)
        begin = recognise.LINES_BEFORE_NAMES[step is not None]
        return cls("", "", step, (begin, b"", host, token, rest, b"", b"", b""), generation)

    @property
    def is_named(self) -> bool:
        """Whether requests have names, which differ."""
        return bool(self.pieces[recognise.BEFORE_REST] or self.pieces[recognise.AFTER_REST]) or not self.path


class TemplateTable:
    """The templates that a kernel recognises."""

    def __init__(self) -> None:
        self._table = recognise.Templates(
            Texts(np.zeros(_TEXT_BYTES, np.uint8), np.zeros(recognise.NUM_PIECES * _MAX_KEPT + 1, np.int64)),
            np.full(2 * _MAX_KEPT, recognise.UNRECOGNISED, np.int32),
            np.zeros(1, np.bool_),
            np.zeros((recognise.NUM_PIECES, 2), np.int64),
        )
        self.pinned = pin(self._table)
        """`Templates` for the kernels."""
        self._numbers: dict[tuple[bytes, ...], int] = {}
        self._kept: list[RequestTemplate] = []

    def __getitem__(self, number: int) -> RequestTemplate:
        """Return a template by its number."""
        return self._kept[number]

    def add(self, template: RequestTemplate) -> None:
        """Add a template, or replace the one with the same pieces."""
        number = self._numbers.get(template.pieces)
        if number is not None:
            self._kept[number] = template
            return
        texts, text, has_token = self._table.texts, b"".join(template.pieces), bool(template.pieces[_AUTHORIZATION])
        number = len(self._kept)
        begin = int(texts.ends[recognise.NUM_PIECES * number])
        if number == _MAX_KEPT or begin + len(text) + MARGIN > _TEXT_BYTES or has_token != self._table.has_token[0]:
            self._clear()
            number = begin = 0
        self._table.has_token[0] = has_token
        texts.data[begin : begin + len(text)] = np.frombuffer(text, np.uint8)
        ends = np.cumsum([begin, *map(len, template.pieces)])
        texts.ends[recognise.NUM_PIECES * number : recognise.NUM_PIECES * (number + 1) + 1] = ends
        recognise.add_template(self.pinned, number)
        self._numbers[template.pieces] = number
        self._kept.append(template)

    def _clear(self) -> None:
        self._table.slots[:] = recognise.UNRECOGNISED
        self._numbers.clear()
        self._kept.clear()
