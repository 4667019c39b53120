"""Many messages of a socket at a time: none is lost, changed or attributed to another sender."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from bridge.stream.messages import Inbox, Inboxes
from tests.support.bridge.inboxes import of_protocol, received

SEQ = (258).to_bytes(8, "big")


class Pair:
    """Two connected sockets of one process."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sender, self.reader = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for each in (self._sender, self.reader):
            each.setsockopt(zmq.SNDHWM, 0)
            each.setsockopt(zmq.RCVHWM, 0)
        self._sender.bind("inproc://pair")
        self.reader.connect("inproc://pair")

    def send(self, messages: list[list[bytes]]) -> None:
        for frames in messages:
            self._sender.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


frame = st.binary(max_size=20) | st.sampled_from([b"", b"kv@w@m", SEQ, bytes(8), b"\xff" * 8, b"x" * 5000])
message = st.lists(frame, min_size=1, max_size=6) | st.tuples(frame, st.binary(min_size=8, max_size=8), frame).map(list)


@given(st.lists(message, max_size=12), st.booleans())
def test_every_message_of_the_protocol_is_received_and_every_other_one_is_counted(
    pair: Pair, messages: list[list[bytes]], with_topics: bool
) -> None:
    pair.send(messages)
    assert received(Inbox(), pair.reader, with_topics=with_topics) == of_protocol(messages, with_topics=with_topics)


def test_the_shape_of_a_message_that_is_not_of_the_protocol_is_known(pair: Pair) -> None:
    inbox = Inbox()
    for frames, shape in (
        ([b"abc"], (1, [3])),
        ([b"", SEQ[1:], b"x"], (3, [0, 7, 1])),
        ([b"", SEQ, b"xy", b"z", b"long"], (5, [0, 8, 2, 1])),
    ):
        pair.send([frames])
        assert not inbox.receive(pair.reader, with_topics=True)
        assert (inbox.num_bad, inbox.bad_sizes) == (1, shape)


def test_more_messages_than_fit_one_pass_wait_for_the_next(pair: Pair) -> None:
    messages = [[b"", number.to_bytes(8, "big"), b"%d" % number] for number in range(10_000)]
    pair.send(messages)
    inbox = Inbox()
    assert inbox.receive(pair.reader, with_topics=False)
    assert 0 < len(inbox) < len(messages)
    first = [int(seq) for sent in inbox for seq in sent.messages.seqs]
    rest = [seq for _, seq, _ in received(inbox, pair.reader, with_topics=False).batches]
    assert first + rest == list(range(10_000))


def test_payloads_larger_than_the_buffer_are_received_and_those_before_them_stay(pair: Pair) -> None:
    large = [bytes([number]) * (3 * 2**20) for number in range(3)]
    messages = [[b"", bytes(8), payload] for payload in (b"small", large[0], b"", large[1], b"a", b"b", large[2])]
    pair.send(messages)
    assert received(Inbox(), pair.reader) == of_protocol(messages)


def test_many_topics_are_kept_apart(pair: Pair) -> None:
    messages = [[b"kv@%d@m" % (number % 7) + b"x" * 4000, bytes(8), b"%d" % number] for number in range(100)]
    pair.send(messages)
    assert received(Inbox(), pair.reader) == of_protocol(messages)


def test_messages_of_one_sender_are_together(pair: Pair) -> None:
    pair.send([[topic, bytes(8), b""] for topic in (b"a", b"a", b"b", b"a", b"a", b"a")])
    inbox = Inbox()
    inbox.receive(pair.reader, with_topics=True)
    assert [(sent.topic, len(sent.messages), sent.connection) for sent in inbox] == [
        ("a", 2, -1),
        ("b", 1, -1),
        ("a", 3, -1),
    ]


def test_a_socket_that_receives_nothing_is_an_error() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket, pytest.raises(zmq.ZMQError):
        Inbox().receive(socket, with_topics=False)


def test_an_inbox_is_used_again_when_it_is_free() -> None:
    inboxes = Inboxes()
    with inboxes.one() as first, inboxes.one() as second:
        assert first is not second
    with inboxes.one() as third:
        assert third in (first, second)
