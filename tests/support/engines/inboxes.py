"""What an inbox receives, message by message."""

from typing import NamedTuple

import zmq

from bridge.stream.messages import Inbox


class Received(NamedTuple):
    """The messages that waited at a socket."""

    batches: list[tuple[str, int, bytes]]
    """Topic, sequence number and payload."""
    num_bad: int
    """Messages that are not of the protocol."""


def received(inbox: Inbox, socket: zmq.Socket[bytes], *, with_topics: bool = True) -> Received:
    """Receive until no more messages wait."""
    batches: list[tuple[str, int, bytes]] = []
    num_bad, has_more = 0, True
    while has_more:
        has_more = inbox.receive(socket, with_topics=with_topics)
        num_bad += inbox.num_bad
        for sent in inbox:
            numbered = map(sent.messages.one, range(len(sent.messages)))
            batches += [(sent.topic, seq, bytes(each)) for seq, each in numbered]
    return Received(batches, num_bad)


def of_protocol(messages: list[list[bytes]], *, with_topics: bool = True) -> Received:
    """Return what an inbox should receive of messages."""
    good = [frames for frames in messages if len(frames) == 3 and len(frames[1]) == 8]
    topics = [frames[0][:4096].decode(errors="replace") if with_topics else "" for frames in good]
    batches = [(topic, int.from_bytes(seq, "big"), each) for topic, (_, seq, each) in zip(topics, good, strict=True)]
    return Received(batches, len(messages) - len(good))
