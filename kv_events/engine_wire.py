"""The engines' own event protocol over ZMQ: frames of replays, and topics. No sockets here.

vLLM defined the protocol and SGLang follows it. A PUB socket sends `topic, sequence number, batch`. A ROUTER socket
replays the batches that it still keeps, in one of two layouts, and ends an answer with a marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kv_events.errors import KvsightError

SEQ_BYTES = 8
"""Length of a sequence number: an unsigned integer, big-endian."""
END = b"\xff" * SEQ_BYTES
"""Sequence number that ends a replay."""

Payload: TypeAlias = bytes | memoryview
"""An encoded batch. A large one is a view of the ZMQ message, which saves a copy."""


class FrameError(KvsightError):
    """A message does not have the frames of the protocol."""


class ReplayMessage(NamedTuple):
    """A message of the replay socket: a batch, or the end marker."""

    seq: int
    """-1: the end marker."""
    payload: Payload

    @property
    def is_end(self) -> bool:
        """Whether the answer is complete."""
        return self.seq < 0


class PodTopic(NamedTuple):
    """Pod and model of a topic, by llm-d's convention `kv@<pod>@<model>`."""

    pod: str
    model: str | None


def seq_frame(seq: int) -> bytes:
    """The frame of a sequence number."""
    return seq.to_bytes(SEQ_BYTES, "big")


def parse_replay(frames: Sequence[bytes]) -> ReplayMessage:
    """Read either layout, `seq, payload` or `topic, seq, payload`, behind an empty delimiter. Raises FrameError."""
    if not 2 <= len(frames) <= 4 or len(frames[-2]) != SEQ_BYTES:
        raise FrameError(f"{len(frames)} frames of {[len(frame) for frame in frames[:5]]} bytes")
    seq, payload = frames[-2:]
    return ReplayMessage(-1 if seq == END else int.from_bytes(seq, "big"), payload)


def replay_request(start: int) -> list[bytes]:
    """The frames that ask for all kept batches from number `start` on."""
    return [b"", seq_frame(start)]


def parse_replay_request(frames: Sequence[bytes]) -> int:
    """First batch that a request asks for. frames: without the reader's identity. Raises FrameError."""
    if len(frames) != 2 or len(frames[1]) != SEQ_BYTES:
        raise FrameError(f"{len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes")
    return int.from_bytes(frames[1], "big")


def parse_topic(topic: str) -> PodTopic:
    """Read a topic. One of another form than llm-d's is a pod's name as a whole."""
    parts = topic.split("@")
    if len(parts) == 3 and parts[0] == "kv":
        return PodTopic(parts[1], parts[2] or None)
    return PodTopic(topic, None)
