"""Engines that answer over HTTP and publish events, behind a real Envoy with a real endpoint picker and service."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import msgspec

from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port

BLOCK_SIZE = 16


class Received(NamedTuple):
    """A request, as an engine got it."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class EchoingEngine:
    """An engine that answers with the body it got, in two parts, and publishes the pages of its first prompt of tokens.

    `x-hold` in a request: the second part waits for `let_go`.
    """

    events: ZmqEngine
    received: list[Received] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)
    server: ThreadingHTTPServer = field(init=False)

    def __post_init__(self) -> None:
        self.server = _Server(("127.0.0.1", free_port()), _handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def hold(self, tokens: list[int]) -> None:
        """Let the cache hold the whole pages of a prompt."""
        num_pages, first = len(tokens) // BLOCK_SIZE, abs(hash(tuple(tokens))) >> 8
        event = ["BlockStored", list(range(first, first + num_pages)), None, tokens, BLOCK_SIZE, None, "GPU"]
        self.events.send(msgspec.msgpack.encode([time.time(), [event], 0]))


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client may disconnect."""


def _handler(engine: EchoingEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self._body()
            if self.path != "/metrics":  # which the service reads at any time
                engine.received.append(Received(self.path, dict(self.headers.items()), body))
            self.send_response(200)
            self.send_header("Content-Type", self.headers.get("x-answer", "text/event-stream"))
            self.send_header("X-Engine", engine.address)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            half = len(body) // 2
            self._chunk(body[:half])
            if "x-hold" in self.headers:
                engine.let_go.wait(30)
            self._chunk(body[half:])
            self._chunk(b"")

        do_GET = do_POST  # noqa: N815  (the name that the server looks for)

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("transfer-encoding", ""):
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def log_message(self, *_: object) -> None:
            """Write no access log."""

    return Handler
