"""Direct connections: kernels serve many of them in one pass.

A connection becomes direct after its first queries. Its transport no longer reads. Instead, an epoll object reports
which connections have a request. A kernel reads the requests and recognises their templates, another one answers those
with the same template. A template is known once a request with it has been answered: requests with it have the same
path, caller and fields, but other numbers and other lines in the head that do not matter, such as request ids.
The owner of a connection answers the other requests. It takes the connection back for those that take time, when the
connection ends, and after an error. All runs in the event loop's thread, so nothing changes while the kernels answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from api.fast.kernels import connections as kernels
from api.fast.kernels.head import NUM_FOUND
from api.fast.kernels.query import Times
from api.fast.kernels.recognise import NUM_BORDERS, UNRECOGNISED
from api.fast.templates import RequestTemplate, TemplateTable
from api.fast.writer import texts
from kv_events.kernels.bundles import pin
from kv_events.runtime.outages import RateLimitedLogger

logger = logging.getLogger(__name__)

MOST_AT_ONCE, _PASS_S = 32, 1e-3
"""Connections that are served in one pass, and the time that it may take, before other callers are answered."""
_LENGTH_BYTES = 128  # room for the end of a head, from the digits of its Content-Length on
_HEAD_BEGIN = b"HTTP/1.1 200 OK\r\n%bcontent-length: "
_HEAD_END = b"\r\ncontent-type: application/json\r\n\r\n"


class Owner(Protocol):
    """The protocol of a connection."""

    def response_headers(self) -> bytes:
        """Return the header lines of any answer."""

    def answer_now(self, data: bytes) -> bool:
        """Answer a request at once, if that is possible. Returns whether the connection can stay as it is."""

    def resume(self, data: bytes, rest: bytes) -> None:
        """Read again. data: what was read of a request. rest: what is left to send of the answer before it."""

    def abort(self) -> None:
        """Close the connection at once."""


class DirectPlan(Protocol):
    """How requests with one template are answered now."""

    @property
    def answer_bytes(self) -> int:
        """Bound on the size of an answer."""

    def answer_requests(self, sockets: kernels.SocketBuffers, count: int, head_size: int, times: Times) -> int:
        """Answer `count` requests, as the kernel of this name does."""


_Pending: TypeAlias = tuple[int, bytes, bytes]
"""A connection with which its owner goes on, data and rest: see `Owner.resume`."""


class KernelConnections:
    """The direct connections of one server. The event loop's thread calls it."""

    def __init__(
        self,
        plan: Callable[[RequestTemplate], DirectPlan | None],
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
        self._owners: dict[int, Owner] = {}  # by file descriptor
        self._templates = TemplateTable()
        self._answered_at: dict[int, float] = {}  # by file descriptor
        self._ready = list[int]()  # the connections of this pass
        self._at_once = MOST_AT_ONCE
        self._epoll: select.epoll | None = None
        self._use(_empty_buffers())
        self._headers: bytes | None = None  # that are written in the head of answers
        self._head_size = 0

    def learn(self, template: RequestTemplate) -> None:
        """Recognise requests with this template from now on."""
        self._templates.add(template)

    def join(self, connection: int, owner: Owner) -> None:
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
        self._answered_at[connection] = loop.time()
        self._owners[connection] = owner

    def leave(self, connection: int, owner: Owner) -> None:
        """Stop serving a connection. It may have been closed, and another one may have its file descriptor by now."""
        if self._epoll is not None and self._owners.get(connection) is owner:
            with suppress(OSError):
                self._epoll.unregister(connection)
            del self._owners[connection]
            self._close_if_unused()

    def answered_at(self, connection: int) -> float:
        """Return the time of the last pass that answered a request of a connection, by the clock of the loop."""
        return self._answered_at[connection]

    def _close_if_unused(self) -> None:
        if self._epoll is not None and not self._owners:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _serve(self) -> None:
        """Serve connections that have a request, one template after the other.

        Those that have waited for the longest time come first, as epoll lists them in turn.
        """
        assert self._epoll is not None
        began, alike = time.perf_counter(), dict[int, list[int]]()
        ready = [connection for connection, _ in self._epoll.poll(0, self._at_once) if connection in self._owners]
        if not ready:
            return
        count, sockets = len(ready), self._sockets
        sockets.connections[:count] = ready
        kernels.read_requests(self._pinned, self._templates.pinned, count)
        self._ready = ready
        for number, template in enumerate(sockets.templates[:count].tolist()):
            alike.setdefault(template, []).append(number)
        self._answered_at.update(dict.fromkeys(ready, asyncio.get_running_loop().time()))
        read_s = (time.perf_counter() - began) / count
        alike.pop(kernels.UNREAD, None)
        pending = [self._request(number) for number in alike.pop(UNRECOGNISED, ())]
        for template, members in alike.items():
            try:
                pending += self._answer_alike(self._templates[template], members, read_s)
            except Exception as error:  # noqa: BLE001  (other connections are served)
                self._limited_logger.warning("direct connections are closed: %r", error)
                for number in members:
                    self._abort(ready[number], self._owners[ready[number]])
        for each in pending:  # which may add templates
            self._hand_over(each)
        fitting = int(_PASS_S * count / (time.perf_counter() - began))
        self._at_once = max(1, min(MOST_AT_ONCE, 2 * self._at_once, fitting))

    def _answer_alike(self, template: RequestTemplate, members: list[int], read_s: float) -> list[_Pending]:
        """Answer requests with the same template. Returns what is left to their owners.

        members: the numbers of the requests. read_s: seconds in which each one was read.
        """
        began, count = time.perf_counter(), len(members)
        plan = self._plan(template)
        if plan is None:
            return [self._request(number) for number in members]
        self._prepare(self._owners[self._ready[members[0]]].response_headers(), plan.answer_bytes)
        pending = list[_Pending]()
        self._sockets.members[:count] = members
        if plan.answer_requests(self._pinned, count, self._head_size, self._times()) < count:
            outcomes = list(zip(members, self._sockets.outcomes[members].tolist(), strict=True))
            pending = [self._request(number) for number, outcome in outcomes if outcome == kernels.RETURNED]
            count -= len(pending)
            pending += [self._rest(number) for number, outcome in outcomes if outcome == kernels.CUT]
        if count and template.path:
            self._note(template.path, read_s + (time.perf_counter() - began) / count, count)
        return pending

    def _request(self, number: int) -> _Pending:
        begin, end, *_ = self._sockets.borders[number].tolist()
        return self._ready[number], self._sockets.data[begin:end].tobytes(), b""

    def _rest(self, number: int) -> _Pending:
        begin, end = self._sockets.rest_borders[number].tolist()
        return self._ready[number], b"", self._sockets.rests[begin:end].tobytes()

    def _hand_over(self, pending: _Pending) -> None:
        """Let its owner go on with a connection: answer a request at once, or take the connection back."""
        connection, data, rest = pending
        owner = self._owners[connection]
        try:
            if not (data and owner.answer_now(data)):
                self.leave(connection, owner)
                owner.resume(data, rest)
        except Exception as error:  # noqa: BLE001  (the others are served)
            self._limited_logger.warning("a direct connection is closed: %r", error)
            self._abort(connection, owner)

    def _abort(self, connection: int, owner: Owner) -> None:
        """Close a connection of which something may be lost."""
        self.leave(connection, owner)
        owner.abort()

    def _prepare(self, headers: bytes, answer_bytes: int) -> None:
        """Make room for answers, and write the fixed part of their head."""
        if headers is not self._headers:
            begin = _HEAD_BEGIN % headers
            head = np.frombuffer(bytearray(begin + bytes(_LENGTH_BYTES)), np.uint8)
            self._use(self._sockets._replace(head=head))
            self._headers, self._head_size = headers, len(begin)
        if len(self._sockets.rests) < len(self._sockets.head) + answer_bytes:
            self._use(self._sockets._replace(rests=np.zeros(2 * (len(self._sockets.head) + answer_bytes), np.uint8)))

    def _use(self, sockets: kernels.SocketBuffers) -> None:
        self._sockets, self._pinned = sockets, pin(sockets)


def _empty_buffers() -> kernels.SocketBuffers:
    return kernels.SocketBuffers(
        _functions(),
        np.zeros(MOST_AT_ONCE, np.int32),
        np.zeros(MOST_AT_ONCE, np.int32),
        np.zeros(MOST_AT_ONCE, np.int32),
        np.zeros(MOST_AT_ONCE, np.int32),
        np.zeros(kernels.ROOM_BYTES, np.uint8),
        np.zeros((MOST_AT_ONCE, NUM_BORDERS), np.int64),
        np.zeros(_LENGTH_BYTES, np.uint8),
        texts((_HEAD_END,)),
        np.zeros(0, np.uint8),
        np.zeros((MOST_AT_ONCE, 2), np.int64),
        np.zeros(4, np.uint64),
        np.zeros((NUM_FOUND, 2), np.int64),
    )


def _functions() -> npt.NDArray[np.uint64]:
    """Return the addresses of the C library's functions, see `kernels.connections.READ`."""
    library = ctypes.CDLL(None)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (library.read, library.writev)]
    assert len(addresses) == kernels.NUM_FUNCTIONS
    return np.array(addresses, np.uint64)
