"""The server's HTTP protocol: most queries are answered as soon as their last byte has arrived.

A request enters the fast path if its head is one that `HeadReader` accepts and no other request of the connection is in
progress. All its bytes are held until it is complete. If the fast path does not answer it, it is passed to FastAPI, as
if it had arrived just now. Connections become direct after some queries: see `api.fast.kernel_connections`.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from api.fast.fast_path import FastPath
from api.fast.heads import Head
from api.fast.http_limits import HEAD, LimitedHttpProtocol
from api.problems import ProblemError

_ANSWERS_BEFORE_DIRECT, _ANSWERS_AFTER_RETURN = 2, 16
_ANSWERS_AFTER_CUT = 1024  # large answers often do not fit into the socket's buffer
_LARGE_ANSWER = 2**15  # a copy takes longer than another call


class FastConnection(LimitedHttpProtocol):
    """One connection."""

    def __init__(self, *, fast_path: FastPath, **options: Any) -> None:
        super().__init__(**options)
        self._fast_path = fast_path
        self._held = bytearray()  # the part of a request in the fast path that has arrived
        self._missing = 0
        self._answering: asyncio.Task[None] | None = None  # to a request whose answer comes later
        self._is_ending = False
        self._direct = fast_path.direct
        self._direct_as: int | None = None  # the file descriptor, while this connection is direct
        self._until_direct = _ANSWERS_BEFORE_DIRECT

    def take(self, data: bytes) -> None:
        """Answer a request in the fast path, or pass it on."""
        if self._held:
            self._held += data
            self._missing -= len(data)
            if self._missing > 0:
                self._note_held()
                return
            data = self._take_held()
        if not (self._is_free() and self._is_taken(data)):
            self.feed(data)

    def is_arriving(self) -> bool:
        """Return whether a request has arrived in part."""
        return bool(self._held) or self.is_parsing

    def connection_lost(self, exc: Exception | None) -> None:
        if self._direct_as is not None:
            self._direct.leave(self._direct_as, self)
        self._take_held()
        super().connection_lost(exc)

    def refuse(self, problem: ProblemError) -> None:
        """Answer a request that has not arrived completely, if its answer is the next one. Close the connection."""
        super().refuse(problem)
        self._take_held()

    def _is_taken(self, data: bytes) -> bool:
        """Answer a complete request, or hold one that is still arriving. Returns False for one that is to be parsed.

        Of several requests at once, it takes the first one.
        """
        read = self._fast_path.heads.read(data)
        if read is None:
            return False
        head, start = read
        end = start + head.content_length
        self._missing = end - len(data)
        if self._missing > 0:
            self._held += data
            self.began_at = self.loop.time()
            self._note_held()
            return True
        if self._missing < 0:
            self.hold_rest(data[end:])
            data = data[:end]
        later = self._fast_path.answer_later(head, data, start)
        if later is not None:
            self.body_limit.note(later, len(data), self.refuse)
            self.body_limit.complete(later)
            self._answering = self.loop.create_task(self._answer_later(later, head, data), name="query")
            return True
        body = self._fast_path.answer(head, data, start)
        if body is None:
            self.feed(data)
            return True
        if self.rest:
            self.loop.call_soon(self.resume_held)
        self._respond(body, self._fast_path.media_type(head))
        self._until_direct -= 1
        if self._until_direct <= 0:
            self._until_direct = _ANSWERS_AFTER_RETURN
            if self.scheme == "http" and self._learn(head, data, start):
                self.loop.call_soon(self._become_direct)  # the answer has been sent by then
        return True

    async def _answer_later(self, later: Awaitable[bytes | None], head: Head, data: bytes) -> None:
        body = await later
        self._answering = None
        self.body_limit.release(later)
        if self.transport.is_closing():
            return
        if body is None:
            self.feed(data)
        else:
            self._respond(body, self._fast_path.media_type(head))
        if self._is_ending:
            super().shutdown()
        elif body is not None:
            self.resume_held()

    def is_answering(self) -> bool:
        """Return whether the answer to a request of the fast path comes later."""
        return self._answering is not None

    def _learn(self, head: Head, data: bytes, start: int) -> bool:
        """Let direct connections recognise requests like this one. Returns whether they can."""
        template = self._fast_path.request_template(head, data, start)
        if template is not None:
            self._direct.learn(template)
        return template is not None

    def _become_direct(self) -> None:
        if self._direct_as is not None or self._held or self.rest:
            return
        if self._is_free() and self.transport.get_write_buffer_size() == 0:
            connection = self.transport.get_extra_info("socket").fileno()
            try:
                self._direct.join(connection, self)
            except OSError:  # too many files are open
                self._until_direct = _ANSWERS_AFTER_CUT
            else:
                self._direct_as = connection
                self.transport.pause_reading()

    def answer_now(self, data: bytes) -> bool:
        """Answer a request of this connection, which is direct, and let similar ones be recognised.

        Returns False if it is not one complete request, and the connection must be taken back.
        """
        read = self._fast_path.heads.read(data)
        if read is None or read[1] + read[0].content_length != len(data):
            return False
        head, start = read
        body = self._fast_path.answer(head, data, start)
        if body is None:
            self._end_direct()
            self.feed(data)
            return True
        self._learn(head, data, start)
        self._respond(body, self._fast_path.media_type(head))
        if self.transport.get_write_buffer_size():
            self._end_direct()
        return True

    def resume(self, data: bytes, rest: bytes) -> None:
        """Read again. data: what was read of a request. rest: what is left to send of the answer before it."""
        self.heard_at = self.last_request_at()
        self._direct_as = None
        self._until_direct = _ANSWERS_AFTER_CUT if rest else _ANSWERS_AFTER_RETURN
        self.transport.resume_reading()
        if rest:
            self.transport.write(rest)
        if data:
            self.data_received(data)

    def _end_direct(self) -> None:
        """Take the connection back, if it is direct. It is open."""
        if self._direct_as is not None:
            self._direct.leave(self._direct_as, self)
            self.resume(b"", b"")

    def last_request_at(self) -> float:
        """Return when the last complete request came, by the clock of the loop. 0: none came."""
        if self._direct_as is not None:
            return self._direct.answered_at(self._direct_as)
        return self.heard_at

    def _is_free(self) -> bool:
        """Return whether the fast path may answer: no request is in progress, and the client reads its answers."""
        return (
            not self.is_parsing
            and self._answering is None
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
            and not self.transport.is_closing()
            and not self.is_beyond_limit
        )

    def _respond(self, body: bytes, media_type: bytes) -> None:
        status = b"200 OK\r\nconnection: close" if self._is_ending else b"200 OK"
        head = HEAD % (status, self.response_headers(), len(body), media_type)
        if len(body) > _LARGE_ANSWER:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head + body)
        self.server_state.total_requests += 1
        self.heard_at = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_request(self.timeout_keep_alive)

    def response_headers(self) -> bytes:
        """Return the header lines of any answer."""
        return self._fast_path.encoded_headers(self.server_state.default_headers)

    def _wait_for_request(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, unless the fast path answered or began a request since the timer was set.

        To set it anew for each answer would take a tenth of the time of a short query.
        """
        self.timeout_keep_alive_task = None
        idle_s = self.loop.time() - self.last_request_at()
        if self._held or self._answering is not None:
            return
        if idle_s < self.timeout_keep_alive:
            self._wait_for_request(self.timeout_keep_alive - idle_s)
        else:
            self._end_direct()
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """End the connection after the request that is arriving."""
        self._end_direct()
        self._is_ending = True
        if self._answering is not None:
            return
        if self._held:
            self.feed(self._take_held())
        super().shutdown()

    def _note_held(self) -> None:
        self.arrived_bytes = len(self._held)
        self.body_limit.note(self, self.arrived_bytes, self.refuse)

    def _take_held(self) -> bytes:
        data = bytes(self._held)
        self._held.clear()
        self.body_limit.release(self)
        return data
