"""The server's HTTP protocol: usual queries are answered as soon as their last byte has arrived.

Connections whose requests repeat become direct: see `api.hot_lane.direct`.

A request enters the hot lane if its head is one that `Heads` accepts and no other request of the connection is in
progress. All its bytes are held until it is complete. If the lane does not answer it, the bytes are passed to
uvicorn's protocol, as if they had arrived just now.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.hot_lane.direct import Repeated
from api.hot_lane.heads import MAX_BYTES, Head
from api.hot_lane.lane import HotLane
from api.problems import ProblemError

MAX_HEAD_BYTES = 2**14
"""Bound on the head of a request."""
ARRIVAL_S = 60.0
"""Time in which a request must have arrived completely."""

_SLICE_BYTES = 2**10
"""Data that httptools reads at once, apart from bodies: about ten requests."""
_PIPELINE_PAUSE_S = 0.02
"""Pause between two requests of the ordinary way of which the client sent the second before the answer to the first.

A client that pipelines without end thus takes a fiftieth of the time of the event loop.
"""
_HEAD = b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\ncontent-type: application/%b\r\n\r\n"
_ANSWERS_BEFORE_DIRECT, _ANSWERS_AFTER_RETURN = 1, 16
_ANSWERS_AFTER_CUT = 1024  # large answers often do not fit into the socket's buffer
_LARGE_ANSWER = 2**15  # a copy takes longer than another call
_END_OF_HEAD = b"\r\n\r\n"


class _Flow(FlowControl):
    """Does not read while a connection holds requests that wait for their turn, so that it holds only a few."""

    is_held = False

    def resume_reading(self) -> None:
        """Read again, unless requests are held. A hook of uvicorn."""
        if not self.is_held:
            super().resume_reading()


class HotProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *, lane: HotLane, max_connections: int, **options: Any) -> None:
        super().__init__(**options)
        self._lane = lane
        self._max_connections = max_connections
        self._is_parsing = False  # httptools has begun a request that has not arrived completely
        self._held = bytearray()  # the part of a request in the lane that has arrived
        self._missing = 0
        self._answered_at = 0.0  # by the clock of the loop
        self._rest = bytearray()  # what arrived after a request that is not answered yet
        self._is_in_head = False  # of a request that httptools reads
        self._body_bytes = 0  # that are missing of it, as far as they are announced
        self._head_bytes = 0
        self._arrival: asyncio.TimerHandle | None = None  # while a request arrives in parts
        self._began_at = 0.0  # first byte of that request, by the clock of the loop
        self._before: RequestResponseCycle | None = None  # the last request before the one that arrives
        self._direct = lane.direct
        self._direct_as: int | None = None  # the file descriptor, while this connection is direct
        self._until_direct = _ANSWERS_BEFORE_DIRECT
        self._repeated: Repeated | None = None

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._hold_rest(data)
            return
        if self._held:
            self._held += data
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = self._take_held()
        if not (self._is_free() and self._is_taken(data)):
            self._feed(data)
        if (bool(self._held) or self._is_parsing) != (self._arrival is not None):
            self._set_arrival()

    def _feed(self, data: bytes) -> None:
        """Pass data to httptools in slices, until a request waits for the answer to another one.

        httptools would read all requests at once, and bounds neither the number nor the size of headers.
        """
        at = 0
        while at < len(data) and not self.transport.is_closing():
            if at > 0 and self._is_client_ahead():
                self._hold_rest(data[at:])
                return
            piece = data[at : at + max(_SLICE_BYTES, self._body_bytes)]
            at += len(piece)
            if self._is_in_head:
                self._head_bytes += len(piece)
            super().data_received(piece)
            if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(ProblemError(431, "", f"headers: more than {MAX_HEAD_BYTES} bytes"))

    def _is_client_ahead(self) -> bool:
        """Return whether a request has arrived completely and is not answered yet."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return bool(self.pipeline) or not (self._is_parsing or is_answered)

    def _hold_rest(self, data: bytes) -> None:
        """Hold what a client sent after a request that is not answered yet."""
        self._rest += data
        self.flow.pause_reading()
        self.flow.is_held = True

    def _go_on(self) -> None:
        """Read the next one of several requests that arrived at once."""
        if self._rest and not self.transport.is_closing():
            data = bytes(self._rest)
            self._rest.clear()
            self.flow.is_held = False
            self.flow.resume_reading()
            self.data_received(data)

    def on_response_complete(self) -> None:
        """Let other connections have their turn if the client did not wait for this answer."""
        if self._rest or self.pipeline:
            self.loop.call_later(_PIPELINE_PAUSE_S, self._next_of_pipeline)
        else:
            super().on_response_complete()

    def _next_of_pipeline(self) -> None:
        super().on_response_complete()
        if not self.pipeline:  # the next request may have arrived in part
            self._go_on()

    def _set_arrival(self) -> None:
        """Set a limit to the arrival of a request, or cancel it after the request has arrived."""
        if self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL_S, self._give_up)
        else:
            self._arrival.cancel()
            self._arrival = None

    def _give_up(self) -> None:
        left_s = self._began_at + ARRIVAL_S - self.loop.time()
        if left_s > 0:  # a later request arrives by now
            self._arrival = self.loop.call_later(left_s, self._give_up)
            return
        self._refuse(ProblemError(408, "", f"request: not complete after {ARRIVAL_S:.0f} s"))

    def _refuse(self, problem: ProblemError) -> None:
        """Answer a request that has not arrived completely, if its answer is the next one. Close the connection."""
        if not self._is_next_answer_open():
            self.transport.close()
            return
        body, status = msgspec.json.encode(problem.document()), HTTPStatus(problem.status)
        start = b"%d %b\r\nconnection: close" % (status, status.phrase.encode())
        self.transport.write(_HEAD % (start, self.response_headers(), len(body), b"problem+json") + body)
        self.transport.close()

    def _is_next_answer_open(self) -> bool:
        """Return whether the next answer is that to the request that is arriving, and has not begun."""
        if self._held or self.cycle is None:
            return True
        if self.cycle is self._before:
            return bool(self.cycle.response_complete)
        return not self.pipeline and not self.cycle.response_started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        if self._direct is not None and len(self.connections) > self._max_connections:
            self._direct.end()  # their requests are refused as well

    def connection_lost(self, exc: Exception | None) -> None:
        if self._direct is not None and self._direct_as is not None:
            self._direct.leave(self._direct_as, self)
        if self._arrival is not None:
            self._set_arrival()
        super().connection_lost(exc)

    def _is_taken(self, data: bytes) -> bool:
        """Answer a complete request, or hold one that is still arriving. Returns False if the lane does not take it.

        Of several requests at once, it takes the first one.
        """
        start = data.find(_END_OF_HEAD, 0, MAX_BYTES) + len(_END_OF_HEAD)
        head = self._lane.heads.find(data[:start]) if start > len(_END_OF_HEAD) else None
        if head is None:
            return False
        end = start + head.content_length
        self._missing = end - len(data)
        if self._missing > 0:
            self._held += data
            self._began_at = self.loop.time()
            return True
        if self._missing < 0:
            self._hold_rest(data[end:])
            data = data[:end]
        body = self._lane.answer(head, data, start)
        if body is None:
            self._feed(data)
            return True
        if self._rest:
            self.loop.call_soon(self._go_on)
        self._respond(body)
        self._until_direct -= 1
        if self._until_direct <= 0:
            self._consider_direct(head, data, start)
        return True

    def _consider_direct(self, head: Head, data: bytes, start: int) -> None:
        """Make the connection direct if this request repeats the one before."""
        before = self._repeated
        self._repeated = self._lane.repeated(head, data, start) if self._direct is not None else None
        if self._repeated is None:
            self._until_direct = _ANSWERS_AFTER_RETURN
        elif self._repeated == before and self.scheme == "http":
            self.loop.call_soon(self._become_direct)  # the answer has been sent by then

    def _become_direct(self) -> None:
        if self._direct is None or self._repeated is None or self._direct_as is not None or self._held or self._rest:
            return
        if self._is_free() and self.transport.get_write_buffer_size() == 0:
            connection = self.transport.get_extra_info("socket").fileno()
            try:
                self._direct.join(connection, self, self._repeated)
            except OSError:  # too many files are open
                self._until_direct = _ANSWERS_AFTER_CUT
            else:
                self._direct_as = connection
                self.transport.pause_reading()

    def resume(self, data: bytes, rest: bytes) -> None:
        """Read again. data: what was read of a request. rest: what is left to send of the answer before it."""
        self._answered_at = self._last_answer_at()
        self._direct_as, self._repeated = None, None
        self._until_direct = _ANSWERS_AFTER_CUT if rest else _ANSWERS_AFTER_RETURN
        self.transport.resume_reading()
        if rest:
            self.transport.write(rest)
        if data:
            self.data_received(data)

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def _end_direct(self) -> None:
        """Take the connection back, if it is direct. It is open."""
        if self._direct is not None and self._direct_as is not None:
            self._direct.leave(self._direct_as, self)
            self.resume(b"", b"")

    def _last_answer_at(self) -> float:
        if self._direct is not None and self._direct_as is not None:
            return self._direct.answered_at(self._direct_as)
        return self._answered_at

    def _is_free(self) -> bool:
        """Return whether no request is in progress, the client reads its answers and the server is not overloaded."""
        return (
            not self._is_parsing
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
            and not self.transport.is_closing()
            and len(self.connections) <= self._max_connections
        )

    def _respond(self, body: bytes) -> None:
        head = _HEAD % (b"200 OK", self.response_headers(), len(body), b"json")
        if len(body) > _LARGE_ANSWER:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head + body)
        self.server_state.total_requests += 1
        self._answered_at = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_request(self.timeout_keep_alive)

    def response_headers(self) -> bytes:
        """Return the header lines of any answer."""
        return self._lane.encoded_headers(self.server_state.default_headers)

    def _wait_for_request(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, unless the lane answered or began a request since the timer was set.

        To set it anew for each answer would take a tenth of the time of a short query.
        """
        self.timeout_keep_alive_task = None
        idle_s = self.loop.time() - self._last_answer_at()
        if self._held:
            return
        if idle_s < self.timeout_keep_alive:
            self._wait_for_request(self.timeout_keep_alive - idle_s)
        else:
            self._end_direct()
            super().timeout_keep_alive_handler()

    def on_message_begin(self) -> None:
        self._is_parsing = self._is_in_head = True
        self._head_bytes = 0
        self._began_at, self._before = self.loop.time(), self.cycle
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._body_bytes = self._announced_bytes()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Count what follows as headers: trailers follow the last chunk."""
        self._is_in_head, self._head_bytes = True, 0

    def _announced_bytes(self) -> int:
        """Return the Content-Length of the request that httptools reads, 0 if there is none."""
        return next((int(value) for name, value in self.headers if name == b"content-length"), 0)

    def on_body(self, body: bytes) -> None:
        self._is_in_head = False
        self._body_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_parsing = self._is_in_head = False
        self._body_bytes = 0
        super().on_message_complete()

    def shutdown(self) -> None:
        """End the connection after the request that is arriving."""
        self._end_direct()
        if self._held:
            self._feed(self._take_held())
        super().shutdown()

    def _take_held(self) -> bytes:
        data = bytes(self._held)
        self._held.clear()
        return data
