"""A ZMQ publisher that costs next to nothing: it writes messages that were framed beforehand to a plain socket.

Publishers of libzmq need more time for a small message than the services under comparison, and share their processors.
The bytes on the wire are the same (ZMTP 3.0 without security).
"""

import socket
from collections.abc import Iterable

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
_MORE, _LONG = 1, 2
_MAX_SHORT = 255


def framed(messages: Iterable[tuple[bytes, ...]]) -> bytes:
    """Return the bytes on the wire of messages, which are given as frames."""
    parts: list[bytes] = []
    for frames in messages:
        for number, frame in enumerate(frames):
            more = _MORE if number < len(frames) - 1 else 0
            is_long = len(frame) > _MAX_SHORT
            size = len(frame).to_bytes(8 if is_long else 1, "big")
            parts += [bytes([more | (_LONG if is_long else 0)]), size, frame]
    return b"".join(parts)


class Publisher:
    """One address, for one subscriber at a time."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._connection = self._listening

    def accept(self) -> None:
        """Wait for a subscriber and its subscription."""
        self._connection, _ = self._listening.accept()
        self._connection.sendall(_GREETING + _READY)
        self._read(len(_GREETING))
        flags = self._read_frame()
        while flags & 4:  # commands, of which the first says that the subscriber is ready
            flags = self._read_frame()

    def send(self, wire: bytes) -> None:
        """Send the bytes of framed messages. Waits while the subscriber does not read."""
        self._connection.sendall(wire)

    def close(self) -> None:
        """Close the connection and the address."""
        self._connection.close()
        self._listening.close()

    def _read_frame(self) -> int:
        """Read one frame. Returns its flags."""
        flags = self._read(1)[0]
        self._read(int.from_bytes(self._read(8 if flags & _LONG else 1), "big"))
        return flags

    def _read(self, num_bytes: int) -> bytes:
        content = b""
        while len(content) < num_bytes:
            part = self._connection.recv(num_bytes - len(content))
            if not part:
                raise ConnectionError("the subscriber left")
            content += part
        return content
