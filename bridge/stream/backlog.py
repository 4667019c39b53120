"""Messages that arrive while those before them are applied. ZMQ bounds its queues in messages only, this in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq.asyncio

from bridge.counters import BridgeCounters
from bridge.stream.inbox import Inbox, Inboxes, Sent

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
        self._passes: deque[tuple[int, list[Sent]]] = deque()  # with what each takes

    def __bool__(self) -> bool:
        return bool(self._passes)

    def add(self, inbox: Inbox) -> None:
        """Add a copy of the messages in an inbox."""
        sent, num_bytes = inbox.copied()
        self._passes.append((num_bytes + _BYTES_A_MESSAGE * len(inbox), sent))
        self._grow(self._passes[-1][0])
        while len(self._passes) > 1 and (
            self._num_bytes > _MAX_BYTES or self._inboxes.backlog_bytes > _MAX_FLEET_BYTES
        ):
            self._counters.dropped_batches += sum(len(each.batches.seqs) for each in self.take())

    def take(self) -> list[Sent]:
        """Remove and return the oldest messages."""
        num_bytes, sent = self._passes.popleft()
        self._grow(-num_bytes)
        return sent

    def clear(self) -> None:
        """Drop all messages."""
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
