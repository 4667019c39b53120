"""The connections of one ZMQ socket, tracked by its monitor's events and by the messages that arrive over them."""

from __future__ import annotations

import zmq

CONNECTION_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""The monitor events that `Connections.take` needs."""


class Connections:
    """Open connections that completed their handshake, by file descriptor. True if there are any.

    A monitor also reports connections that never complete one: port scanners, health checks, sockets of a wrong type.
    It gives the descriptor of a connection that begins or ends, but not of one that completes its handshake. That is
    assumed to be the newest open one until a message proves otherwise.
    """

    def __init__(self) -> None:
        self._begun: list[int] = []  # without a handshake; newest last
        self._made: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._made)

    def take(self, event: int, descriptor: int) -> None:
        """Apply an event of the monitor. descriptor: the event's value."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._begun:
                self._made.add(self._begun.pop())
        elif event == zmq.EVENT_DISCONNECTED:
            self._made.discard(descriptor)
            if descriptor in self._begun:
                self._begun.remove(descriptor)
        else:
            self._begun.append(descriptor)

    def note_message(self, descriptor: int) -> bool:
        """Note a message's connection. False if the connection was lost since, or is not known yet."""
        if descriptor in self._begun:
            self._begun.remove(descriptor)
            self._made.add(descriptor)
        return descriptor in self._made
