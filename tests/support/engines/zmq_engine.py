"""An engine's event publisher, written from the protocol: live stream, replay socket, drops and restarts on demand."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal, Self

import zmq

from tests.support.servers.child_process import free_port

_POLL_MS = 20
_HIGH_WATER_MARK = 100_000
END = b"\xff" * 8


class ZmqEngine:
    """One rank of an engine. Sends from the caller's thread; a separate thread answers replay requests.

    The live socket is an XPUB, which reports subscriptions. On the wire it does not differ from a PUB.
    """

    def __init__(
        self,
        *,
        layout: Literal["old", "new"] = "new",
        replay: bool = True,
        buffer_steps: int = 10_000,
        topic: str = "",
        first_seq: int = 0,
        answers_at_most: int = 10**9,
        connect_to: str | None = None,
        port: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """layout: format of replay answers. answers_at_most: batches in one; the rest is dropped, as by a ROUTER's
        high-water mark. connect_to: address that the reader binds, as with a wildcard address.
        host: IPv6 addresses are written in brackets.
        """
        self.seq = first_seq
        self.topic = topic.encode()
        self.requests: list[int] = []
        """First sequence numbers of the requested replays."""
        self._answers_at_most = answers_at_most
        self._first_seq = first_seq
        self._layout = layout
        self._connect_to = connect_to
        self._host = host
        self._port = port or free_port()
        self._replay_port = free_port() if replay else None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._lock = threading.Lock()  # guards the buffer
        self._thread: threading.Thread | None = None  # answers replay requests
        self._open()

    @property
    def endpoint(self) -> str:
        return f"tcp://{self._host}:{self._port}"

    @property
    def replay_endpoint(self) -> str | None:
        return None if self._replay_port is None else f"tcp://{self._host}:{self._replay_port}"

    def send(self, payload: bytes, fate: Literal["sent", "dropped", "lost"] = "sent") -> int:
        """Send the next batch and return its number. dropped: available by replay only; lost: not available at all."""
        seq, self.seq = self.seq, self.seq + 1
        if fate != "lost":
            with self._lock:
                self._buffer.append((seq, payload))
        if fate == "sent":
            self.send_raw(self.topic, seq.to_bytes(8, "big"), payload)
        return seq

    def send_raw(self, *frames: bytes) -> None:
        """Send any message."""
        self._live.send_multipart(frames)

    def wait_for_readers(self, count: int = 1, deadline_s: float = 60.0) -> None:
        """Wait for `count` subscriptions since the start."""
        for _ in range(count):
            assert self._live.poll(int(deadline_s * 1000)), "no subscriber"
            self._live.recv()

    def open_replay(self, port: int) -> None:
        """Open the replay socket. Needed only for an engine that was made without one."""
        self._replay_port = port
        router = self._context.socket(zmq.ROUTER)
        router.bind(f"tcp://{self._host}:{port}")
        self._thread = threading.Thread(target=self._answer, args=(router,), name="replay")
        self._thread.start()

    def stop(self) -> None:
        """Close all sockets, as if the process were killed. Idempotent."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._context.destroy(linger=0)  # waits until the ports are free

    def restart(self) -> None:
        """Start another incarnation on the same ports."""
        self.stop()
        self.seq = self._first_seq
        self._buffer.clear()
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _open(self) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.IPV6, self._host.startswith("["))  # of its sockets
        self._live = self._context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._live.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        if self._connect_to is None:
            self._live.bind(self.endpoint)
        else:
            self._live.connect(self._connect_to)
        self._ending = threading.Event()
        if self._replay_port is not None:
            self.open_replay(self._replay_port)

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        while not self._ending.is_set():
            if not router.poll(_POLL_MS):
                continue
            frames = router.recv_multipart()
            if len(frames) != 3:
                continue  # no answer, as from engines
            start = int.from_bytes(frames[2], "big")
            self.requests.append(start)
            with self._lock:
                kept = [entry for entry in self._buffer if entry[0] >= start]
            for seq, payload in kept[: self._answers_at_most]:
                router.send_multipart(self._answered(frames[0], self.topic, seq.to_bytes(8, "big"), payload))
            router.send_multipart(self._answered(frames[0], b"", END, b""))
        router.close(linger=0)

    def _answered(self, reader: bytes, topic: bytes, seq: bytes, payload: bytes) -> Sequence[bytes]:
        return [reader, b"", topic, seq, payload] if self._layout == "new" else [reader, b"", seq, payload]
