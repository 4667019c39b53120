"""Messages of a socket: none is lost, changed or attributed to another sender, and those that wait have a bound."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Self

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from bridge.context import BridgeCounters
from bridge.stream import messages as module
from bridge.stream.messages import Backlog, Inbox, Inboxes, receiving
from tests.support.engines.inboxes import of_protocol, received

SEQ = (258).to_bytes(8, "big")


class Pair:
    """Two connected sockets of one process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._sender, self.reader = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for each in (self._sender, self.reader):
            each.setsockopt(zmq.SNDHWM, 0)
            each.setsockopt(zmq.RCVHWM, 0)
        address = f"inproc://{id(self)}"
        self._sender.bind(address)
        self.reader.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._sender.close(linger=0)
        self.reader.close(linger=0)

    def send(self, messages: list[list[bytes]]) -> None:
        for frames in messages:
            self._sender.send_multipart(frames)


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as own:
        yield own


@pytest.fixture(scope="module")
def pair(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Pair]:
    with Pair(context) as pair:
        yield pair


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


# --- messages that wait ---------------------------------------------------------------------------------------------

BOUND = 10_000


class Waiting(Pair):
    """Two sockets, and the backlog of the one that receives."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], inboxes: Inboxes) -> None:
        super().__init__(context)
        self.counters = BridgeCounters()
        self._inboxes = inboxes
        self.backlog = Backlog(inboxes, zmq.asyncio.Socket.shadow(self.reader), self.counters)

    def add(self, first: int, payloads: Sequence[bytes]) -> None:
        """Send messages with ascending numbers, and add them."""
        self.send([[b"topic", seq.to_bytes(8, "big"), payload] for seq, payload in enumerate(payloads, first)])
        with self._inboxes.one() as inbox:
            inbox.receive(self.reader, with_topics=True)
            self.backlog.add(inbox)

    def taken(self) -> list[tuple[str, int, bytes]]:
        """Take everything."""
        found = []
        while self.backlog:
            for sent in self.backlog.take():
                batches = map(sent.messages.one, range(len(sent.messages)))
                found += [(sent.topic, seq, bytes(payload)) for seq, payload in batches]
        return found


@given(st.lists(st.lists(st.binary(max_size=3000), min_size=1, max_size=5), max_size=12))
def test_the_newest_messages_that_fit_are_kept_in_order(
    context: zmq.Context[zmq.Socket[bytes]], passes: list[list[bytes]]
) -> None:
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        patched.setattr(module, "_MAX_BYTES", BOUND)
        inboxes = Inboxes()
        rig = stack.enter_context(Waiting(context, inboxes))
        sent: list[tuple[str, int, bytes]] = []
        for payloads in passes:
            rig.add(len(sent), payloads)
            sent += [("topic", len(sent) + number, payload) for number, payload in enumerate(payloads)]
            assert inboxes.backlog_bytes <= max(BOUND, sum(map(len, payloads)) + 64 * len(payloads))
        kept = rig.taken()
        assert kept == sent[len(sent) - len(kept) :]
        assert rig.counters.dropped_batches == len(sent) - len(kept)
        assert inboxes.backlog_bytes == 0
        if sum(len(payload) + 64 for _, _, payload in sent) <= BOUND:
            assert len(kept) == len(sent)


def test_all_backlogs_together_have_a_bound_and_each_keeps_its_newest_messages(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_FLEET_BYTES", BOUND)
    inboxes = Inboxes()
    with Waiting(context, inboxes) as first, Waiting(context, inboxes) as second:
        for rig in (first, second):
            for number in range(4):
                rig.add(number, [bytes(2000)])
        assert [seq for _, seq, _ in first.taken()] == [0, 1, 2, 3]
        assert [seq for _, seq, _ in second.taken()] == [3]
        second.add(9, [b"x"])
        second.backlog.clear()
    assert inboxes.backlog_bytes == 0


async def test_what_arrives_is_received_for_as_long_as_the_block_waits() -> None:
    calls: list[bool] = []
    enough = asyncio.Event()

    def receive() -> None:
        calls.append(True)
        if len(calls) == 3:
            enough.set()

    with receiving(receive):
        await asyncio.wait_for(enough.wait(), 20)
    num_calls = len(calls)
    with receiving(lambda: None):
        await asyncio.sleep(0)
    assert len(calls) == num_calls
