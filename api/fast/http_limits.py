"""An HTTP protocol that bounds what a client may make the server hold, and for how long, from its TLS handshake on."""

import asyncio
import ssl
import types
from collections.abc import Callable, Coroutine, Generator
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from api.access.connections import HEAD_S, SMALL_BYTES, BodyLimit, ConnectionLimit, Waiting
from api.problems import ProblemError

MAX_HEAD_BYTES = 2**14
"""Bound on the head of a request."""
ARRIVAL_S = 60.0
"""Time in which a request must have arrived completely."""
STEP_S = 5.0
"""Time in which `LEAST_BYTES` of a large body must arrive."""
LEAST_BYTES = 5 * 2**14

_INVALID = "request: not valid HTTP/1.1"
_BYTES_BESIDE = len(": \r\n")  # name and value of a header
_SLICE_BYTES = 2**10
"""Data that httptools reads at once, apart from bodies: about ten requests."""
_PIPELINE_PAUSE_S = 0.02
"""Pause between two pipelined requests that FastAPI answers.

A client that pipelines without end takes a fiftieth of the time of the event loop.
"""
HEAD = b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\ncontent-type: application/%b\r\n\r\n"
"""Head of an answer: status, other headers, length of the body, kind of the body."""


class _Flow(FlowControl):
    """Does not read while a connection holds requests that wait, so that it holds only a few."""

    is_held = False

    def resume_reading(self) -> None:
        """Read again, unless requests are held. A hook of uvicorn."""
        if not self.is_held:
            super().resume_reading()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. Bounds heads and trailers, the time in which a request arrives, and what a client pipelines."""

    def __init__(self, *, connection_limit: ConnectionLimit, body_limit: BodyLimit, **options: Any) -> None:
        super().__init__(**options)
        self.connection_limit = connection_limit
        self.body_limit = body_limit
        self.accepted_at = self.loop.time()
        self.heard_at = 0.0  # last complete request
        self._has_entered = False  # whether it counts
        self.is_beyond_limit = False  # only probes are answered
        self.arrived_bytes = 0  # of the body of the request that arrives
        self._application: ASGIApp = self.app
        self._step = (0.0, 0)  # `began_at` and `arrived_bytes` at the last look at them
        self._head_timer: asyncio.TimerHandle | None = None  # for the first head
        self.is_parsing = False  # httptools has begun a request that has not arrived completely
        self.rest = bytearray()  # what arrived after a request that is not answered yet
        self.began_at = 0.0  # first byte of the request that arrives, by the clock of the loop
        self._is_in_head = False  # of a request that httptools reads
        self._body_bytes = 0  # that are missing of it, as far as they are announced
        self._has_headers = False  # what follows are trailers
        self._head_bytes = 0  # of the URL and complete headers
        self._unread_bytes = 0  # the same in whole slices, which also counts a header that has no end
        self._arrival: asyncio.TimerHandle | None = None  # while a request arrives in parts
        self._before: RequestResponseCycle | None = None  # the last request before the one that arrives
        self._running: RequestResponseCycle | None = None  # the request before those in the pipeline
        self._refusal: ProblemError | None = None  # the last answer, which waits for those before it

    def data_received(self, data: bytes) -> None:
        if self.rest or self.is_answering():
            self.hold_rest(data)
            return
        self.take(data)
        if self.is_arriving() != (self._arrival is not None):
            self._set_arrival()

    def take(self, data: bytes) -> None:
        """Handle data that does not wait for an answer to an earlier request."""
        self.feed(data)

    def is_answering(self) -> bool:
        """Return whether an answer is being made, apart from those of the application."""
        return False

    def is_arriving(self) -> bool:
        """Return whether a request has arrived in part."""
        return self.is_parsing

    def feed(self, data: bytes) -> None:
        """Pass data to httptools in slices, until a request waits for the answer to another one.

        httptools would read all requests at once, and bounds neither the number nor the size of headers.
        """
        at = 0
        while at < len(data) and not self.transport.is_closing() and self._refusal is None:
            if at > 0 and self._is_client_ahead():
                self.hold_rest(data[at:])
                return
            piece = data[at : at + max(_SLICE_BYTES, self._body_bytes)]
            at += len(piece)
            if self._is_in_head:
                self._unread_bytes += len(piece)
            self._parse(piece)
            if self._is_in_head and self._unread_bytes > MAX_HEAD_BYTES:
                self.refuse(_too_large())

    def _parse(self, data: bytes) -> None:
        """Pass data to httptools. Requests for another protocol are answered in this one."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            known = error.__context__
            self.refuse(known if isinstance(known, ProblemError) else ProblemError(400, None, _INVALID))

    def _is_client_ahead(self) -> bool:
        """Return whether a request has arrived completely and is not answered yet."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return bool(self.pipeline) or not (self.is_parsing or is_answered)

    def hold_rest(self, data: bytes) -> None:
        """Hold what a client sent after a request that is not answered yet."""
        self.rest += data
        self.flow.pause_reading()
        self.flow.is_held = True

    def resume_held(self) -> None:
        """Read the next one of several requests that arrived at once."""
        if self.rest and not self.transport.is_closing():
            data = bytes(self.rest)
            self.rest.clear()
            self.flow.is_held = False
            self.flow.resume_reading()
            self.data_received(data)

    def on_response_complete(self) -> None:
        """Answer the next request, after a pause if the client did not wait for this answer."""
        if self.rest or self.pipeline:
            self.loop.call_later(_PIPELINE_PAUSE_S, self._next_of_pipeline)
        else:
            self._next_of_pipeline()

    def _next_of_pipeline(self) -> None:
        is_last = not self.pipeline
        self._running = self.cycle if is_last else self.pipeline[-1][0]
        super().on_response_complete()
        if is_last and self._refusal is not None and not self.transport.is_closing():
            self._send_refusal(self._refusal)
        elif not self.pipeline:  # the next request may have arrived in part
            self.flow.is_held = bool(self.rest)
            self.flow.resume_reading()
            self.resume_held()

    def _set_arrival(self) -> None:
        """Set a limit to the arrival of a request, or cancel it after the request has arrived."""
        if self._arrival is None:
            self._step = (self.began_at, 0)
            self._arrival = self.loop.call_later(min(STEP_S, ARRIVAL_S), self._check_arrival)
        else:
            self._arrival.cancel()
            self._arrival = None

    def _check_arrival(self) -> None:
        left_s = self.began_at + ARRIVAL_S - self.loop.time()
        began_at, bytes_before = self._step
        is_slow = began_at == self.began_at and self.arrived_bytes - bytes_before < LEAST_BYTES
        if left_s <= 0:
            self.refuse(ProblemError(408, None, f"request: not complete after {ARRIVAL_S:.0f} s"))
        elif is_slow and self.arrived_bytes > SMALL_BYTES and not self.flow.read_paused:
            self.refuse(ProblemError(408, None, f"body: less than {LEAST_BYTES} bytes in {STEP_S:.0f} s", "body"))
        else:
            self._step = (self.began_at, self.arrived_bytes)
            self._arrival = self.loop.call_later(min(STEP_S, left_s), self._check_arrival)

    def _check_head(self) -> None:
        """Close a connection that has not sent a complete head."""
        if self.is_parsing and self._is_in_head and not (self.cycle or self.last_request_at()):
            self.refuse(ProblemError(408, None, f"headers: not complete after {HEAD_S:.0f} s"))
        elif not (self.is_arriving() or self.is_answering() or self.cycle or self.last_request_at()):
            self.abort()

    def last_request_at(self) -> float:
        """Return when the last complete request came, by the clock of the loop. 0: none came."""
        return self.heard_at

    def waiting(self) -> Waiting | None:
        """See `api.access.connections.Connection`."""
        is_due = self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)
        if (is_due or self.pipeline or self.is_answering()) and not self.flow.write_paused:
            return None
        last = self.last_request_at()
        since = self.began_at if last and self.is_arriving() else last or self.accepted_at
        return Waiting(self.is_arriving() or not last, since)

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def refuse(self, problem: ProblemError) -> None:
        """Answer a request that has not arrived completely, after those before it. Close the connection."""
        if self.is_parsing and self.cycle is not self._before:  # the application has its head
            self.cycle.disconnected = True  # TLS may take some seconds to close
            self.cycle.message_event.set()
            if not self.pipeline:
                if self.cycle.response_started:
                    self.transport.close()
                else:
                    self._send_refusal(problem)
                return
            self.body_limit.release(self.pipeline.popleft()[1])
        elif self.cycle is None or self.cycle.response_complete:
            self._send_refusal(problem)
            return
        self._refusal = problem

    def _send_refusal(self, problem: ProblemError) -> None:
        body, status = msgspec.json.encode(problem.document()), HTTPStatus(problem.status)
        start = b"%d %b\r\nconnection: close" % (status, status.phrase.encode())
        if problem.retry_after_s is not None:
            start += b"\r\nretry-after: %d" % problem.retry_after_s
        self.transport.write(HEAD % (start, self.response_headers(), len(body), b"problem+json") + body)
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        if not self._has_entered:
            self.enter(transport)
        if self.is_beyond_limit:
            self._application = self.connection_limit.for_probes(self._application)
        left_s = self.accepted_at + HEAD_S - self.loop.time()
        self._head_timer = self.loop.call_later(max(0.0, left_s), self._check_head)

    def enter(self, transport: asyncio.Transport) -> None:
        """Count the connection, also before its TLS handshake."""
        self.transport, self._has_entered = transport, True
        self.connections.add(self)
        host = (get_remote_addr(transport) or ("",))[0]
        self.is_beyond_limit = not self.connection_limit.enter(self, host)

    def leave(self) -> None:
        """Count the connection no longer."""
        self.connections.discard(self)
        self.connection_limit.leave(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._arrival is not None:
            self._set_arrival()
        if self._head_timer is not None:
            self._head_timer.cancel()
        self.leave()
        for _, application in self.pipeline:  # they never begin
            self.body_limit.release(application)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def response_headers(self) -> bytes:
        """Return the header lines of any answer."""
        return b"".join(b"%b: %b\r\n" % header for header in self.server_state.default_headers)

    def on_message_begin(self) -> None:
        self.is_parsing = self._is_in_head = True
        self._has_headers = False
        self._head_bytes = self._unread_bytes = self.arrived_bytes = 0
        self.began_at, self._before = self.loop.time(), self.cycle
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def _unset_keepalive_if_required(self) -> None:
        """Let only a request end the wait for it: empty lines do not."""
        if self.is_parsing or self.transport.is_closing():
            super()._unset_keepalive_if_required()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are dropped: the application may have got its headers before they arrive."""
        self._count(len(name) + len(value) + _BYTES_BESIDE)
        if not self._has_headers:
            super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        """Count a part of a head, so that its bound does not depend on packets. Raises ProblemError."""
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _too_large()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._has_headers = False, True
        self._body_bytes = self._announced_bytes()
        if self.parser.should_upgrade() and (self._body_bytes or b"transfer-encoding" in dict(self.headers)):
            raise ProblemError(
                400, None, "Upgrade: not supported in a request with a body", "Upgrade"
            )  # it is not read
        self.app = self._app_of_request()
        super().on_headers_complete()
        if self.pipeline:
            self.flow.is_held = True  # also while the application reads the body of an earlier request
        else:
            self._running = self.cycle
        if self.is_beyond_limit:
            self.cycle.keep_alive = False

    def _app_of_request(self) -> ASGIApp:
        """Return an application for one request. Its body counts until it ends, even if the caller is gone before."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await self._application(scope, receive, send)
            finally:
                self.body_limit.release(answer)

        return answer

    def on_chunk_header(self) -> None:
        """Count what follows as headers: trailers follow the last chunk."""
        self._is_in_head, self._head_bytes, self._unread_bytes = True, 0, 0

    def _announced_bytes(self) -> int:
        """Return the Content-Length of the request that httptools reads, 0 if there is none."""
        return next((int(value) for name, value in self.headers if name == b"content-length"), 0)

    def on_body(self, body: bytes) -> None:
        self._is_in_head = False
        self._body_bytes -= len(body)
        self.arrived_bytes += len(body)
        super().on_body(body)
        if not self.cycle.response_complete:
            self.body_limit.note(self.app, self.arrived_bytes, self.refuse)

    def on_message_complete(self) -> None:
        self.is_parsing = self._is_in_head = False
        self._body_bytes = 0
        self.heard_at = self.loop.time()
        self.body_limit.complete(self.app)
        super().on_message_complete()


def _too_large() -> ProblemError:
    return ProblemError(431, None, f"headers: more than {MAX_HEAD_BYTES} bytes")


_SHUTDOWN_S = 5.0


class TlsHandshake(asyncio.Protocol):
    """One connection, which belongs to an HTTP protocol after its handshake."""

    def __init__(self, *, http: Callable[..., LimitedHttpProtocol], context: ssl.SSLContext, **options: Any) -> None:
        self._http = http(**options)  # its time begins now
        self._context = context
        self._early = bytearray()  # what arrived with the end of the handshake: some event loops deliver it at once

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        loop = self._http.loop
        self._http.enter(transport)
        if not transport.is_closing():
            times = {"ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": _SHUTDOWN_S}
            handshake: Any = loop.start_tls(transport, self, self._context, server_side=True, **times)  # type: ignore[arg-type]
            # event loops read as soon as this method has returned, so the first step is made here
            self._task = loop.create_task(self._take_over(_continued(handshake, handshake.send(None))))

    async def _take_over(self, handshake: Any) -> None:
        try:
            secure = await handshake
        except OSError:  # of TLS or of the connection
            secure = None
        if secure is None or secure.is_closing():
            self._http.leave()
            return
        secure.set_protocol(self._http)
        self._http.connection_made(secure)
        if self._early:
            self._http.data_received(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.leave()


@types.coroutine
def _continued(coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """Go on with a coroutine that has been started. waits_for: what it yielded."""
    yield waits_for
    return (yield from coroutine)
