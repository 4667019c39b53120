"""Templates of whole requests, by which the kernels of direct connections recognise them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from api.fast.heads import Head, request_line
from api.fast.kernels.connections import MAX_REQUEST_BYTES
from api.fast.kernels.recognise import (
    AFTER_REST,
    BEFORE_REST,
    LINES_BEFORE_NAMES,
    MOST_ARRAYS,
    NUM_PIECES,
    UNRECOGNISED,
    Templates,
    add_template,
)
from api.fast.kernels.text import MARGIN, Texts
from api.fast.templates import BodyTemplate
from kv_events.kernels.bundles import pin

_MAX_KEPT, _TEXT_BYTES = 2**12, 2**20
"""Bounds on the templates of a table and on their text. A full table is cleared."""
_AUTHORIZATION = 3


class RequestTemplate(NamedTuple):
    """What requests have in common that ask the same about different prompts."""

    path: str
    """Empty: the requests have no body."""
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
        if max(template.before.count(b"["), template.after.count(b"]")) > MOST_ARRAYS:
            return None
        pieces = (request_line(head.path), *head.caller.lines, *template.pieces)
        found = cls(head.path, template.question, pieces, generation)
        has_odd_name = getattr(template.question, "selection_id", None) and not found.is_named
        return None if has_odd_name else found  # a kernel would not see the name, and would give another one

    @classmethod
    def without_body(cls, head: Head, generation: int) -> RequestTemplate:
        """Return the template of requests without a body."""
        (_, host, token), (*_, step) = head.caller.lines, head.parameters
        rest = b"%b HTTP/1.1\r\n" % (b"" if step is None else b"/" + step)
        begin = LINES_BEFORE_NAMES[step is not None]
        return cls("", step, (begin, b"", host, token, rest, b"", b"", b""), generation)

    @property
    def is_named(self) -> bool:
        """Whether requests have names, which differ."""
        return bool(self.pieces[BEFORE_REST] or self.pieces[AFTER_REST]) or not self.path


class TemplateTable:
    """The templates that a kernel recognises."""

    def __init__(self) -> None:
        self._table = Templates(
            Texts(np.zeros(_TEXT_BYTES, np.uint8), np.zeros(NUM_PIECES * _MAX_KEPT + 1, np.int64)),
            np.full(2 * _MAX_KEPT, UNRECOGNISED, np.int32),
            np.zeros(1, np.bool_),
            np.zeros((NUM_PIECES, 2), np.int64),
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
        begin = int(texts.ends[NUM_PIECES * number])
        if number == _MAX_KEPT or begin + len(text) + MARGIN > _TEXT_BYTES or has_token != self._table.has_token[0]:
            self._clear()
            number = begin = 0
        self._table.has_token[0] = has_token
        texts.data[begin : begin + len(text)] = np.frombuffer(text, np.uint8)
        ends = np.cumsum([begin, *map(len, template.pieces)])
        texts.ends[NUM_PIECES * number : NUM_PIECES * (number + 1) + 1] = ends
        add_template(self.pinned, number)
        self._numbers[template.pieces] = number
        self._kept.append(template)

    def _clear(self) -> None:
        self._table.slots[:] = UNRECOGNISED
        self._numbers.clear()
        self._kept.clear()
