"""A TCP proxy that a test cuts, holds up, slows down and heals: the network between two real processes."""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from tests.support.servers.child_process import free_port

_CHUNK = 2**16
_RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: the close of a connection is a reset
_T = TypeVar("_T")


class TcpProxy:
    """`with TcpProxy("127.0.0.1:9092") as link:` forwards connections to `link.address` to a server.

    It runs in a thread of its own. All methods may be called from any other thread, in any order.
    """

    def __init__(self, target: str) -> None:
        """target: address of the server, `host:port`."""
        self.port = free_port()
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._rate: float | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._passable = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()
        self.heal()

    @property
    def address(self) -> str:
        """The address that clients connect to, `host:port`."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset all connections and refuse new ones, as if a cable were cut at the host itself."""
        self._call(self._cut())

    def blackhole(self) -> None:
        """Let nothing pass and tell nobody. New connections are accepted. What was sent passes when it heals."""
        self._call(self._block())

    def lose(self) -> None:
        """Let nothing pass on the present connections, for good, and tell nobody. New ones pass."""
        self._call(self._lose())

    def slow(self, bytes_per_s: float) -> None:
        """Let that much pass in each direction of each connection."""
        self._call(self._open(bytes_per_s))

    def heal(self) -> None:
        """Let everything pass again."""
        self._call(self._open(None))

    def close(self) -> None:
        """Cut everything and end the thread. Idempotent."""
        if self._thread.is_alive():
            self.cut()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, step: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(30)

    async def _cut(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _block(self) -> None:
        self._passable.clear()
        await self._listen()

    async def _lose(self) -> None:
        self._passable.clear()
        self._passable = asyncio.Event()
        self._passable.set()

    async def _open(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._passable.set()
        await self._listen()

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passable = self._passable
        try:
            with _closing(writer):
                await passable.wait()
                their_reader, their_writer = await asyncio.open_connection(*self._target)
                with _closing(their_writer):
                    async with asyncio.TaskGroup() as pumps:
                        pumps.create_task(self._pump(reader, their_writer, passable))
                        pumps.create_task(self._pump(their_reader, writer, passable))
        except* OSError:
            pass  # one side was lost, and the other one was told

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passable: asyncio.Event) -> None:
        while data := await reader.read(_CHUNK):
            await passable.wait()
            writer.write(data)
            await writer.drain()
            if self._rate is not None:
                await asyncio.sleep(len(data) / self._rate)
        await passable.wait()
        writer.write_eof()


@contextmanager
def _closing(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Close a connection: with a reset after an error, as that of a process that was killed."""
    try:
        yield
        writer.close()
    finally:
        if not writer.is_closing():
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
