"""Messages that arrive while those before them are applied. ZMQ bounds its queues in messages only, this in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq.asyncio

from bridge.counters import BridgeCounters
from bridge.stream.inbox import Inbox, Sent

_PERIOD_S = 0.005
_MAX_BYTES = 64 * 2**20
"""Of one address."""
_MAX_FLEET_BYTES = 256 * 2**20
_BYTES_A_MESSAGE = 64
"""What a message takes besides its payload. Bounds tiny ones."""


class Backlogs:
    """Bounds the backlogs of a fleet together."""

    def __init__(self) -> None:
        self._all: set[Backlog] = set()

    def open(self, socket: zmq.asyncio.Socket, counters: BridgeCounters) -> Backlog:
        """Open the backlog of a socket. It must be closed."""
        backlog = Backlog(self, socket, counters)
        self._all.add(backlog)
        return backlog

    def close(self, backlog: Backlog) -> None:
        """Forget a backlog."""
        self._all.discard(backlog)

    def keep_bound(self) -> None:
        """Drop the oldest messages of the largest backlogs."""
        while sum(each.num_bytes for each in self._all) > _MAX_FLEET_BYTES:
            if not max(self._all, key=lambda each: each.num_bytes).drop_oldest():
                return


class Backlog:
    """Live messages of one socket, oldest first. True if there are any.

    Beyond the bounds the oldest are dropped: the newest show which numbers are missing.
    """

    def __init__(self, fleet: Backlogs, socket: zmq.asyncio.Socket, counters: BridgeCounters) -> None:
        self.socket = socket
        """Where further messages may wait."""
        self.num_bytes = 0
        self._fleet = fleet
        self._counters = counters
        self._passes: deque[tuple[int, list[Sent]]] = deque()  # with what each takes

    def __bool__(self) -> bool:
        return bool(self._passes)

    def add(self, inbox: Inbox) -> None:
        """Add a copy of the messages in an inbox."""
        sent, num_bytes = inbox.copied()
        num_bytes += _BYTES_A_MESSAGE * len(inbox)
        self._passes.append((num_bytes, sent))
        self.num_bytes += num_bytes
        while self.num_bytes > _MAX_BYTES and self.drop_oldest():
            pass
        self._fleet.keep_bound()

    def take(self) -> list[Sent]:
        """Remove and return the oldest messages."""
        num_bytes, sent = self._passes.popleft()
        self.num_bytes -= num_bytes
        return sent

    def drop_oldest(self) -> bool:
        """Drop the oldest messages. False if there are only the newest."""
        if len(self._passes) < 2:
            return False
        self._counters.dropped_batches += sum(len(each.batches.seqs) for each in self.take())
        return True

    def close(self) -> None:
        """Drop all messages."""
        self._passes.clear()
        self._fleet.close(self)


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
