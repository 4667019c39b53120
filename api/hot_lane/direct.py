"""Direct connections: those whose requests repeat. A kernel serves them, many in one pass.

A connection becomes direct after two requests that differ only in their numbers. Its transport no longer reads.
Instead, an epoll object tells which direct connections have a request, and the kernel reads it and writes the answer.
Any other request, the end of a connection and any error return the connection to its protocol, with all bytes that the
kernel has read. The kernel runs in the event loop's thread, so nothing changes while it answers.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import select
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from api.answer_layouts import texts
from api.answer_writer import Plan, Times
from api.hot_lane.direct_kernels import (
    ANSWERED,
    CUT,
    MAX_REQUEST_BYTES,
    NUM_FUNCTIONS,
    RETURNED,
    ROOM_BYTES,
    Exchange,
    Pattern,
)
from api.hot_lane.envelopes import Envelope
from api.questions import Question
from kv_events.bundles import Resident, resident

_MOST = 32
"""Connections that are served in one pass, before others have their turn."""
_MOST_PATTERNS = 1024
_HEAD_BYTES = 4096
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([1-9][0-9]*)\r\n", re.IGNORECASE)
_START = b"HTTP/1.1 200 OK\r\n%bcontent-length: "
_END = b"\r\ncontent-type: application/json\r\n\r\n"

IS_SUPPORTED = hasattr(select, "epoll")
"""Only Linux has epoll."""


class Repeated(NamedTuple):
    """What is alike in all requests of a direct connection."""

    path: str
    question: Question
    before: bytes
    """The head up to the digits of Content-Length."""
    between: bytes
    """The head after these digits, and the body up to the numbers."""
    after: bytes
    """The body after the numbers."""
    head_rest: int
    """Bytes of `between` that belong to the head."""
    generation: int
    """`Heads.generation` when the head was accepted."""

    @classmethod
    def of(cls, path: str, data: bytes, start: int, envelope: Envelope, generation: int) -> Repeated | None:
        """Return what is alike in requests like this one, or None if a kernel cannot read them.

        data: a request. start: where its body begins. generation: `Heads.generation`.
        """
        length = _LENGTH.search(data, 0, start)
        if length is None or len(data) > MAX_REQUEST_BYTES or envelope.question.field != "token_ids":
            return None
        first, end = length.span(1)
        between = data[end : start + envelope.num_before]
        return cls(path, envelope.question, data[:first], between, envelope.after, start - end, generation)

    def pattern(self) -> Pattern:
        """Return the same for the kernel."""
        return Pattern(texts((self.before, self.between, self.after)), np.array([self.head_rest]))


class Owner(Protocol):
    """The protocol of a connection."""

    def response_headers(self) -> bytes:
        """Return the header lines of any answer."""

    def note_answers(self, count: int) -> None:
        """Count answers of direct connections of the server."""

    def resume(self, data: bytes, rest: bytes) -> None:
        """Read again. data: what was read of a request. rest: what is left to send of the answer before it."""


class _Member(NamedTuple):
    owner: Owner
    repeated: Repeated
    pattern: Resident


class DirectConnections:
    """The direct connections of one server. The event loop's thread calls it."""

    def __init__(
        self,
        plan: Callable[[Repeated], Plan | None],
        times: Callable[[], Times],
        note: Callable[[str, float, int], None],
    ) -> None:
        """plan: returns how requests are answered, None if the kernel must not. times: as for `put_answer`.

        note: is told of answers: path, seconds of each one, how many.
        """
        self._plan = plan
        self._times = times
        self._note = note
        self._members: dict[int, _Member] = {}  # by file descriptor
        self._patterns: dict[tuple[str, bytes, bytes, bytes], Resident] = {}
        self._answered_at = np.zeros(0)  # by file descriptor
        self._epoll: select.epoll | None = None
        self._exchange = _exchange(0)
        self._resident = resident(self._exchange)
        self._headers = b""  # that are written in the head of answers
        self._head_size = 0

    def join(self, connection: int, owner: Owner, repeated: Repeated) -> None:
        """Serve a connection, whose transport does not read or write. connection: its file descriptor."""
        loop = asyncio.get_running_loop()
        if self._epoll is None:
            self._epoll = select.epoll()
            loop.add_reader(self._epoll.fileno(), self._serve)
        if connection >= len(self._answered_at):
            self._answered_at = np.resize(self._answered_at, 2 * connection + 1)
        self._members[connection] = _Member(owner, repeated, self._pattern_of(repeated))
        self._answered_at[connection] = loop.time()
        self._epoll.register(connection, select.EPOLLIN)

    def _pattern_of(self, repeated: Repeated) -> Resident:
        key = (repeated.path, repeated.before, repeated.between, repeated.after)
        if key not in self._patterns:
            if len(self._patterns) == _MOST_PATTERNS:
                self._patterns.clear()
            self._patterns[key] = resident(repeated.pattern())
        return self._patterns[key]

    def leave(self, connection: int, owner: Owner) -> None:
        """Stop serving a connection, which is open."""
        if self._epoll is not None and self._is_member(connection, owner):
            self._epoll.unregister(connection)
        self.forget(connection, owner)

    def _is_member(self, connection: int, owner: Owner) -> bool:
        """Return whether a connection is direct. After it was closed, another one may have its file descriptor."""
        member = self._members.get(connection)
        return member is not None and member.owner is owner

    def end(self) -> None:
        """Return all connections."""
        for connection in list(self._members):
            self._return(connection)

    def forget(self, connection: int, owner: Owner) -> None:
        """Stop serving a connection, which has been closed."""
        if self._is_member(connection, owner):
            del self._members[connection]
        if not self._members and self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def answered_at(self, connection: int) -> float:
        """Return the time of the last answer, by the clock of the loop."""
        return float(self._answered_at[connection])

    def _serve(self) -> None:
        assert self._epoll is not None
        by_pattern: dict[int, list[int]] = {}
        for connection, _ in self._epoll.poll(0, _MOST):
            member = self._members.get(connection)
            if member is not None:
                by_pattern.setdefault(id(member.pattern), []).append(connection)
        for connections in by_pattern.values():
            self._serve_alike(connections)

    def _serve_alike(self, connections: list[int]) -> None:
        """Serve connections with the same pattern."""
        began, count = time.perf_counter(), len(connections)
        first = self._members[connections[0]]
        plan = self._plan(first.repeated)
        if plan is None:
            for connection in connections:
                self._return(connection)
            return
        self._prepare(first.owner.response_headers(), plan.answer_bytes)
        exchange = self._exchange
        exchange.connections[:count] = connections
        answered = plan.serve(self._resident, first.pattern, count, self._head_size, self._times())
        served = exchange.connections[:count]
        if answered < count:
            outcomes = exchange.outcomes[:count]
            for number in np.flatnonzero((outcomes == RETURNED) | (outcomes == CUT)).tolist():
                begin, end = exchange.borders[number].tolist()
                left = exchange.data[begin:end].tobytes()
                is_cut = outcomes[number] == CUT
                answered += is_cut
                self._return(connections[number], *((b"", left) if is_cut else (left, b"")))
            served = served[outcomes == ANSWERED]
        if answered:
            self._answered_at[served] = asyncio.get_running_loop().time()
            first.owner.note_answers(int(answered))
            self._note(first.repeated.path, (time.perf_counter() - began) / count, int(answered))

    def _return(self, connection: int, data: bytes = b"", rest: bytes = b"") -> None:
        owner = self._members[connection].owner
        self.leave(connection, owner)
        owner.resume(data, rest)

    def _prepare(self, headers: bytes, answer_bytes: int) -> None:
        """Make room for answers, and write the fixed part of their head."""
        if len(self._exchange.data) < ROOM_BYTES + answer_bytes:
            self._exchange = _exchange(2 * answer_bytes)
            self._resident = resident(self._exchange)
            self._headers = b""
        if headers is not self._headers:
            start = _START % headers
            self._exchange.head[: len(start)] = np.frombuffer(start, np.uint8)
            self._headers, self._head_size = headers, len(start)


def _exchange(answer_bytes: int) -> Exchange:
    return Exchange(
        _functions(),
        np.zeros(_MOST, np.int32),
        np.zeros(_MOST, np.int32),
        np.zeros(ROOM_BYTES + answer_bytes, np.uint8),
        np.zeros((_MOST, 2), np.int64),
        np.zeros(_HEAD_BYTES, np.uint8),
        texts((_END,)),
        np.zeros(4, np.uint64),
    )


def _functions() -> np.typing.NDArray[np.uint64]:
    """Return the addresses of the C library's functions, see `direct_kernels.READ`."""
    library = ctypes.CDLL(None)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (library.read, library.writev)]
    assert len(addresses) == NUM_FUNCTIONS
    return np.array(addresses, np.uint64)
