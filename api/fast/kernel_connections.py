"""Direct connections: their requests are alike, and a kernel serves many of them in one pass.

A connection becomes direct after two requests with the same template: the same path, caller and fields, but other
numbers and other lines in the head that do not matter, such as request ids. Its transport no longer reads.
Instead, an epoll object reports which of them have a request, and the kernel reads it and writes the answer.
Any other request, the end of a connection and any error return the connection to its protocol, with all bytes that the
kernel has read. The kernel runs in the event loop's thread, so nothing changes while it answers.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from api.fast.heads import Head, request_line
from api.fast.kernels.answer import Texts
from api.fast.kernels.connections import (
    ANSWERED,
    CUT,
    MAX_REQUEST_BYTES,
    NUM_FUNCTIONS,
    RETURNED,
    ROOM_BYTES,
    SocketBuffers,
)
from api.fast.kernels.head import NUM_FOUND
from api.fast.kernels.query import Times
from api.fast.templates import BodyTemplate
from api.fast.writer import Plan, texts
from kv_events.http.parsed_query import ParsedQuery
from kv_events.kernels.bundles import pin
from kv_events.runtime.rate_limited_logger import RateLimitedLogger

logger = logging.getLogger(__name__)

_MOST, _PASS_S = 32, 1e-3
"""Connections that are served in one pass, and the time that it may take, before other callers are answered."""
_MOST_TEMPLATES = 1024
_LENGTH_BYTES = 128  # room for the end of a head, from the digits of its Content-Length on
_HEAD_BEGIN = b"HTTP/1.1 200 OK\r\n%bcontent-length: "
_HEAD_END = b"\r\ncontent-type: application/json\r\n\r\n"

_IS_ANSWERED, _IS_RETURNED = (np.isin(np.arange(4), outcomes) for outcomes in ((ANSWERED, CUT), (RETURNED, CUT)))


class RequestTemplate(NamedTuple):
    """What all requests of a direct connection have in common."""

    path: str
    question: ParsedQuery
    pieces: tuple[bytes, ...]
    """Request line; values of Content-Type, Host and Authorization, empty if any is accepted; the body before the
    numbers, and after them."""
    generation: int
    """`HeadReader.generation` when the head was accepted."""

    @classmethod
    def of(cls, head: Head, template: BodyTemplate, generation: int) -> RequestTemplate | None:
        """Return the template of a request, or None if a kernel cannot read such requests."""
        if head.content_length > MAX_REQUEST_BYTES or template.question.field != "token_ids":
            return None
        before = template.before
        pieces = (request_line(head.path), *head.caller.lines, before, template.after)
        return cls(head.path, template.question, pieces, generation)


class Owner(Protocol):
    """The protocol of a connection."""

    def response_headers(self) -> bytes:
        """Return the header lines of any answer."""

    def resume(self, data: bytes, rest: bytes) -> None:
        """Read again. data: what was read of a request. rest: what is left to send of the answer before it."""

    def abort(self) -> None:
        """Close the connection at once."""


class _Member(NamedTuple):
    owner: Owner
    template: RequestTemplate
    pieces: Texts


class _Returned(NamedTuple):
    """A connection that goes back to its owner. See `Owner.resume`."""

    connection: int
    data: bytes = b""
    rest: bytes = b""


class KernelConnections:
    """The direct connections of one server. The event loop's thread calls it."""

    def __init__(
        self,
        plan: Callable[[RequestTemplate], Plan | None],
        times: Callable[[], Times],
        note: Callable[[str, float, int], None],
    ) -> None:
        """plan: returns how requests are answered, None if the kernel must not. times: as for `put_answer`.

        note: counts answers: path, seconds of each one, how many.
        """
        self._plan = plan
        self._times = times
        self._note = note
        self._limited_logger = RateLimitedLogger(logger, "direct connections")
        self._members: dict[int, _Member] = {}  # by file descriptor
        self._pieces: dict[tuple[bytes, ...], Texts] = {}
        self._answered_at = np.zeros(0)  # by file descriptor
        self._at_once = _MOST
        self._epoll: select.epoll | None = None
        self._use(_empty_buffers())
        self._headers: bytes | None = None  # that are written in the head of answers
        self._head_size = 0

    def join(self, connection: int, owner: Owner, template: RequestTemplate) -> None:
        """Serve a connection, whose transport must not read or write. Raises OSError.

        connection: its file descriptor.
        """
        loop = asyncio.get_running_loop()
        if self._epoll is None:
            self._epoll = select.epoll()
            loop.add_reader(self._epoll.fileno(), self._serve)
        try:
            self._epoll.register(connection, select.EPOLLIN)
        except OSError:
            self._close_if_unused()
            raise
        if connection >= len(self._answered_at):
            self._answered_at = np.resize(self._answered_at, 2 * connection + 1)
        self._answered_at[connection] = loop.time()
        self._members[connection] = _Member(owner, template, self._pinned_pieces(template.pieces))

    def leave(self, connection: int, owner: Owner) -> None:
        """Stop serving a connection. It may have been closed, and another one may have its file descriptor by now."""
        member = self._members.get(connection)
        if self._epoll is not None and member is not None and member.owner is owner:
            with suppress(OSError):
                self._epoll.unregister(connection)
            del self._members[connection]
            self._close_if_unused()

    def end(self) -> None:
        """Return all connections."""
        self._return([_Returned(connection) for connection in self._members])

    def answered_at(self, connection: int) -> float:
        """Return the time of the last answer, by the clock of the loop."""
        return float(self._answered_at[connection])

    def _pinned_pieces(self, pieces: tuple[bytes, ...]) -> Texts:
        if pieces not in self._pieces:
            if len(self._pieces) == _MOST_TEMPLATES:
                self._pieces.clear()
            self._pieces[pieces] = pin(texts(pieces))
        return self._pieces[pieces]

    def _close_if_unused(self) -> None:
        if self._epoll is not None and not self._members:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _serve(self) -> None:
        """Serve connections that have a request, one template after the other.

        Those that have waited for the longest time come first, as epoll lists them in turn.
        """
        assert self._epoll is not None
        began, alike = time.perf_counter(), dict[int, list[int]]()
        ready = self._epoll.poll(0, self._at_once)
        for connection, _ in ready:
            member = self._members.get(connection)
            if member is not None:
                alike.setdefault(id(member.pieces), []).append(connection)
        for connections in alike.values():
            try:
                self._return(self._serve_alike(connections))
            except Exception as error:  # noqa: BLE001  (other connections are served)
                self._limited_logger.warning("direct connections are closed: %r", error)
                self._abort(connections)
        fitting = int(_PASS_S * len(ready) / (time.perf_counter() - began))
        self._at_once = max(1, min(_MOST, 2 * self._at_once, fitting))

    def _serve_alike(self, connections: list[int]) -> list[_Returned]:
        """Serve connections with the same template. Returns those that the kernel returns."""
        began, count = time.perf_counter(), len(connections)
        first = self._members[connections[0]]
        plan = self._plan(first.template)
        if plan is None:
            return [_Returned(connection) for connection in connections]
        self._prepare(first.owner.response_headers(), plan.answer_bytes)
        sockets = self._sockets
        sockets.connections[:count] = connections
        answered = plan.serve(self._pinned, first.pieces, count, self._head_size, self._times())
        served, returned = sockets.connections[:count], []
        if answered < count:
            outcomes = sockets.outcomes[:count]
            returned = [self._returned(number) for number in np.flatnonzero(_IS_RETURNED[outcomes]).tolist()]
            served = served[_IS_ANSWERED[outcomes]]
        if len(served):
            self._answered_at[served] = asyncio.get_running_loop().time()
            self._note(first.template.path, (time.perf_counter() - began) / len(served), len(served))
        return returned

    def _returned(self, number: int) -> _Returned:
        sockets = self._sockets
        begin, end = sockets.borders[number].tolist()
        left, connection = sockets.data[begin:end].tobytes(), int(sockets.connections[number])
        return _Returned(connection, rest=left) if sockets.outcomes[number] == CUT else _Returned(connection, left)

    def _return(self, returned: list[_Returned]) -> None:
        for connection, data, rest in returned:
            owner = self._members[connection].owner
            self.leave(connection, owner)
            try:
                owner.resume(data, rest)
            except Exception as error:  # noqa: BLE001  (the others are returned)
                self._limited_logger.warning("a direct connection is closed: %r", error)
                owner.abort()

    def _abort(self, connections: list[int]) -> None:
        """Close connections of which something may be lost."""
        for connection in connections:
            member = self._members.get(connection)
            if member is not None:
                self.leave(connection, member.owner)
                member.owner.abort()

    def _prepare(self, headers: bytes, answer_bytes: int) -> None:
        """Make room for answers, and write the fixed part of their head."""
        if len(self._sockets.data) < ROOM_BYTES + answer_bytes:
            self._use(self._sockets._replace(data=np.zeros(ROOM_BYTES + 2 * answer_bytes, np.uint8)))
        if headers is not self._headers:
            begin = _HEAD_BEGIN % headers
            head = np.frombuffer(bytearray(begin + bytes(_LENGTH_BYTES)), np.uint8)
            self._use(self._sockets._replace(head=head))
            self._headers, self._head_size = headers, len(begin)

    def _use(self, sockets: SocketBuffers) -> None:
        self._sockets, self._pinned = sockets, pin(sockets)


def _empty_buffers() -> SocketBuffers:
    return SocketBuffers(
        _functions(),
        np.zeros(_MOST, np.int32),
        np.zeros(_MOST, np.int32),
        np.zeros(ROOM_BYTES, np.uint8),
        np.zeros((_MOST, 2), np.int64),
        np.zeros(_LENGTH_BYTES, np.uint8),
        texts((_HEAD_END,)),
        np.zeros(4, np.uint64),
        np.zeros((NUM_FOUND, 2), np.int64),
    )


def _functions() -> npt.NDArray[np.uint64]:
    """Return the addresses of the C library's functions, see `kernels.connections.READ`."""
    library = ctypes.CDLL(None)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (library.read, library.writev)]
    assert len(addresses) == NUM_FUNCTIONS
    return np.array(addresses, np.uint64)
