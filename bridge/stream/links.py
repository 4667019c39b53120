"""The connections of one ZMQ socket, by its monitor's events and by the messages that come over them."""

from __future__ import annotations

import zmq

LINK_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""What `Links.take` wants to hear of."""


class Links:
    """Connections that shook hands and were not lost, by file descriptor.

    A monitor also tells of connections that never get so far: port scanners, health checks, sockets of a wrong type.
    It names the descriptor of a connection that begins or ends, but not of one that shook hands: that is taken for the
    newest which had not, until a message shows another.
    """

    def __init__(self) -> None:
        self._begun: list[int] = []  # newest last
        self._made: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._made)

    def take(self, event: int, descriptor: int) -> None:
        """An event of the monitor; descriptor: its value."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._begun:
                self._made.add(self._begun.pop())
        elif event == zmq.EVENT_DISCONNECTED:
            self._made.discard(descriptor)
            if descriptor in self._begun:
                self._begun.remove(descriptor)
        else:
            self._begun.append(descriptor)

    def speaks(self, descriptor: int) -> bool:
        """A message came over a connection. False: one that was lost since then, or is not known yet."""
        if descriptor in self._begun:
            self._begun.remove(descriptor)
            self._made.add(descriptor)
        return descriptor in self._made


def descriptor_of(frame: zmq.Frame) -> int:
    """Of the connection that a message came over; -1: it came over none, from within the process."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
