"""The open connections of a socket, derived from the events of its monitor."""

from __future__ import annotations

import zmq

from bridge.stream.subscriber import Connections

BEGUN, MADE, LOST = zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


def after(*events: tuple[int, int]) -> Connections:
    connections = Connections()
    for event, descriptor in events:
        connections.take(event, descriptor)
    return connections


def test_a_connection_is_there_from_its_handshake_until_it_is_lost() -> None:
    assert not after((BEGUN, 5))
    assert after((BEGUN, 5), (MADE, 0))
    assert not after((BEGUN, 5), (MADE, 0), (LOST, 5))
    assert after((BEGUN, 5), (MADE, 0), (LOST, 5), (BEGUN, 5), (MADE, 0))


def test_losing_what_never_shook_hands_changes_nothing() -> None:
    assert after((BEGUN, 5), (MADE, 0), (BEGUN, 6), (LOST, 6))
    assert after((BEGUN, 6), (BEGUN, 5), (MADE, 0), (LOST, 6))
    assert not after((BEGUN, 6), (LOST, 6))


def test_a_message_shows_which_connection_shook_hands() -> None:
    connections = after((BEGUN, 5), (BEGUN, 6), (MADE, 0))
    assert connections.note_message(5)
    connections.take(LOST, 6)
    assert connections
    assert not connections.note_message(6)
    assert not connections.note_message(-1)


def test_a_handshake_of_a_connection_that_was_not_seen_to_begin_is_ignored() -> None:
    assert not after((MADE, 0))
