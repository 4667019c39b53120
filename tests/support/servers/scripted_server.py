"""An HTTP server with scripted answers, one for each request. It records the requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Reply(NamedTuple):
    """One answer."""

    status: int = 200
    body: bytes = b"{}"
    headers: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} Scripted", f"content-length: {len(self.body)}", *self.headers, "", ""]
        return "\r\n".join(lines).encode() + self.body


HANG_UP = None
"""In a script: close the connection without an answer."""


class Request(NamedTuple):
    """A received request."""

    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class ScriptedServer:
    """The script and the requests so far."""

    script: list[Reply | None]
    requests: list[Request] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.requests.append(Request(head[0], headers, body))
                reply = self.script[len(self.requests) - 1]
                if reply is HANG_UP:
                    break
                writer.write(reply.to_bytes())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client disconnected
        finally:
            writer.close()


@asynccontextmanager
async def scripted(*script: Reply | None) -> AsyncIterator[ScriptedServer]:
    """Run a server inside the block."""
    server = ScriptedServer(list(script))
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    server.url = f"http://{host}:{port}"
    async with listening:
        yield server
