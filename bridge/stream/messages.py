"""Live messages of a ZMQ socket, many at a time. They stay in place until they are applied."""

import asyncio
import ctypes
import errno
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import zmq
import zmq.asyncio

from bridge.context import BridgeCounters
from bridge.decoding.decoder import I64Array, Messages
from bridge.stream.kernels import receive
from kv_events.hashing import U64Array
from kv_events.kernels.bundles import pin

_MESSAGES = 4096
_BYTES = 2**20
"""A pass ends with the message that fills this."""
_ROOM_BYTES = 2 * _BYTES
"""More are only kept until the pass after."""
_TOPIC_BYTES = 16 * receive.MAX_TOPIC_BYTES
_FRAME_WORDS = 8  # zmq_msg_t has 64 bytes


class SenderMessages(NamedTuple):
    """Consecutive messages of one sender."""

    topic: str
    """Empty unless topics tell senders apart."""
    connection: int
    """File descriptor of the connection that they arrived over; -1 if they were sent within the process."""
    messages: Messages


class Inbox:
    """Room for the messages of one pass. Not thread-safe."""

    def __init__(self) -> None:
        self._arrays = receive.InboxArrays(
            _functions(),
            np.zeros(_FRAME_WORDS, np.uint64),
            np.zeros(receive.NUM_COUNTS, np.int64),
            np.empty(_ROOM_BYTES, np.uint8),
            np.zeros(_MESSAGES + 1, np.int64),
            np.empty(_MESSAGES, np.uint64),
            np.empty((_MESSAGES, receive.NUM_SENDER_COLUMNS), np.int64),
            np.empty(_TOPIC_BYTES, np.uint8),
        )
        self._counts = self._arrays.counts
        self._frame = ctypes.c_void_p(self._arrays.frame.ctypes.data)
        self._pinned = pin(self._arrays)

    def receive(self, socket: zmq.Socket[bytes], *, with_topics: bool) -> bool:
        """Receive the messages that wait, in place of those before. Returns whether more may wait.

        with_topics: whether topics tell senders apart. Raises zmq.ZMQError.
        """
        if len(self._arrays.data) > _ROOM_BYTES:
            self._make_room(_ROOM_BYTES, 0)
        self._counts[:] = 0
        library = _library()
        library.zmq_msg_init(self._frame)
        try:
            while True:
                error = receive.receive_messages(self._pinned, socket.underlying, with_topics, _BYTES)
                if error != receive.NO_ROOM:
                    break
                num_bytes = int(self._counts[receive.NUM_BYTES])
                self._make_room(num_bytes + int(library.zmq_msg_size(self._frame)), num_bytes)
        finally:
            library.zmq_msg_close(self._frame)
        if error not in (0, errno.EAGAIN):
            raise zmq.ZMQError(error)
        return not error

    @property
    def num_bad(self) -> int:
        """Messages that are not of the protocol."""
        return int(self._counts[receive.NUM_BAD])

    @property
    def message_bytes(self) -> int:
        """Mean size of the messages, or that of the last one that is not of the protocol, if it is larger."""
        return max(int(self._counts[receive.NUM_BYTES]) // max(len(self), 1), sum(self.bad_sizes[1]))

    @property
    def bad_sizes(self) -> tuple[int, list[int]]:
        """Number of frames of the last message that is not of the protocol, and the sizes of the first four."""
        num_frames, *sizes = self._counts[receive.BAD_SHAPE : receive.BAD_SHAPE + receive.SHAPE_SIZE].tolist()
        return num_frames, sizes[:num_frames]

    def __len__(self) -> int:
        return int(self._counts[receive.NUM_MESSAGES])

    def __iter__(self) -> Iterator[SenderMessages]:
        """Yield the messages by sender, in order. They are valid until the next call of `receive`."""
        return self._sent(self._arrays.data.data, self._arrays.borders[: len(self) + 1])

    def copied(self) -> tuple[list[SenderMessages], int]:
        """Return copies of the messages, and their size in bytes."""
        num_bytes = int(self._counts[receive.NUM_BYTES])
        data = memoryview(self._arrays.data[:num_bytes].tobytes())
        return list(self._sent(data, self._arrays.borders[: len(self) + 1].copy())), num_bytes

    def _sent(self, data: memoryview, borders: I64Array) -> Iterator[SenderMessages]:
        arrays, num_messages = self._arrays, len(self)
        seqs = arrays.seqs[:num_messages].view(">u8").astype(np.uint64)
        messages = Messages(seqs, data, borders)
        senders = arrays.senders[: int(self._counts[receive.NUM_SENDERS])].tolist()
        parts = pairwise([*(first for first, *_ in senders), num_messages])
        for (_, connection, at, length), (start, stop) in zip(senders, parts, strict=True):
            if start < stop:
                topic = arrays.topics[at : at + length].tobytes().decode(errors="replace")
                yield SenderMessages(topic, connection, messages.part(start, stop))

    def _make_room(self, num_bytes: int, num_kept: int) -> None:
        """Replace the buffer of the payloads, whose first bytes are kept."""
        data = np.empty(num_bytes, np.uint8)
        data[:num_kept] = self._arrays.data[:num_kept]
        self._arrays = self._arrays._replace(data=data)
        self._pinned = pin(self._arrays)


_MAX_FREE = 8


class Inboxes:
    """Inboxes that are used again. A few are kept."""

    def __init__(self) -> None:
        self._free: list[Inbox] = []
        self.backlog_bytes = 0
        """Bytes of messages that were received and wait, of all sockets."""

    @contextmanager
    def one(self) -> Iterator[Inbox]:
        inbox = self._free.pop() if self._free else Inbox()
        try:
            yield inbox
        finally:
            if len(self._free) < _MAX_FREE:
                self._free.append(inbox)


@lru_cache
def _library() -> ctypes.CDLL:
    """The libzmq that pyzmq uses. Its functions are found by way of the extension module, which is linked to it."""
    extension = ctypes.CDLL(import_module("zmq.backend.cython._zmq").__file__)
    extension.zmq_msg_size.restype = ctypes.c_size_t
    return extension


def _functions() -> U64Array:
    """Addresses of functions, in the order of RECEIVE, DATA, SIZE, MORE, PROPERTY, ERROR and COPY."""
    library = _library()
    functions = [
        library.zmq_msg_recv,
        library.zmq_msg_data,
        library.zmq_msg_size,
        library.zmq_msg_more,
        library.zmq_msg_get,
        library.zmq_errno,
        ctypes.CDLL(None).memcpy,
    ]
    return np.array([ctypes.cast(function, ctypes.c_void_p).value for function in functions], np.uint64)


MAX_MESSAGES = 2**20
"""Most messages of a backlog."""

_PERIOD_S = 0.005
_MAX_BYTES = 64 * 2**20
_MAX_FLEET_BYTES = 256 * 2**20
_BYTES_A_MESSAGE = _MAX_BYTES // MAX_MESSAGES
"""Counted for a message besides its payload."""


class Backlog:
    """Live messages of one socket, oldest first. True if there are any.

    Beyond the bounds the oldest are dropped: the newest show which numbers are missing.
    """

    def __init__(self, inboxes: Inboxes, socket: zmq.asyncio.Socket, counters: BridgeCounters) -> None:
        """inboxes: those of the fleet, which sum up its backlogs."""
        self.socket = socket
        """Where further messages may wait."""
        self._inboxes = inboxes
        self._counters = counters
        self._num_bytes = 0
        self._passes: deque[tuple[int, list[SenderMessages]]] = deque()  # with what each takes

    def __bool__(self) -> bool:
        return bool(self._passes)

    def add(self, inbox: Inbox) -> None:
        sent, num_bytes = inbox.copied()
        self._passes.append((num_bytes + _BYTES_A_MESSAGE * len(inbox), sent))
        self._grow(self._passes[-1][0])
        while len(self._passes) > 1 and (
            self._num_bytes > _MAX_BYTES or self._inboxes.backlog_bytes > _MAX_FLEET_BYTES
        ):
            self._counters.dropped_batches += sum(len(each.messages) for each in self.take())

    def take(self) -> list[SenderMessages]:
        num_bytes, sent = self._passes.popleft()
        self._grow(-num_bytes)
        return sent

    def clear(self) -> None:
        self._passes.clear()
        self._grow(-self._num_bytes)

    def _grow(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._inboxes.backlog_bytes += num_bytes


@contextmanager
def receiving(receive: Callable[[], None]) -> Iterator[None]:
    """Call `receive` every few milliseconds for as long as the block waits for something."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def again() -> None:
        nonlocal timer
        timer = loop.call_later(_PERIOD_S, again)
        receive()

    timer = loop.call_later(_PERIOD_S, again)
    try:
        yield
    finally:
        timer.cancel()
