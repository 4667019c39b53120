"""ZMQ messages of the engines' event protocol, and their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kv_events.errors import InvalidValueError, KvsightError

SEQ_BYTES = 8
END = b"\xff" * SEQ_BYTES
"""Number behind a replay's last batch."""
_MAX_PORT = 65_535
_WILDCARDS = ("*", "::", "0.0.0.0")  # noqa: S104  (looked for, not bound to)
IN_ONE_PLACE = ("ipc://", "inproc://")
"""Addresses that have no wildcards."""


Payload: TypeAlias = bytes | memoryview
"""An encoded batch; a view of a message of ZMQ, which is large enough not to be copied."""


class FrameError(KvsightError):
    """A message does not have the frames of the protocol."""


class LiveMessage(NamedTuple):
    """What a PUB socket sends: topic, sequence number, batch."""

    topic: str
    seq: int
    payload: Payload


class ReplayMessage(NamedTuple):
    """What a replay socket answers, batch by batch; then an end marker."""

    seq: int
    """-1: the end."""
    payload: Payload

    @property
    def is_end(self) -> bool:
        """Whether the answer is complete."""
        return self.seq < 0


class PodTopic(NamedTuple):
    """Who speaks, by llm-d's convention `kv@<pod>@<model>`."""

    pod: str
    model: str | None


def parse_live(frames: Sequence[Payload]) -> LiveMessage:
    """Raises FrameError."""
    if len(frames) != 3 or len(frames[1]) != SEQ_BYTES:
        raise FrameError(f"{len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes")
    return LiveMessage(bytes(frames[0]).decode(errors="replace"), int.from_bytes(frames[1], "big"), frames[2])


def parse_replay(frames: Sequence[bytes]) -> ReplayMessage:
    """Both layouts: `seq, payload`, and `topic, seq, payload`; each behind an empty delimiter. Raises FrameError."""
    if not 2 <= len(frames) <= 4 or len(frames[-2]) != SEQ_BYTES:
        raise FrameError(f"{len(frames)} frames of {[len(frame) for frame in frames[:5]]} bytes")
    seq, payload = frames[-2:]
    return ReplayMessage(-1 if seq == END else int.from_bytes(seq, "big"), payload)


def replay_request(start: int) -> list[bytes]:
    """Ask for all batches from `start` on that are still kept."""
    return [b"", start.to_bytes(SEQ_BYTES, "big")]


def parse_topic(topic: str) -> PodTopic:
    """A topic of another form is the pod's name as a whole."""
    parts = topic.split("@")
    if len(parts) == 3 and parts[0] == "kv":
        return PodTopic(parts[1], parts[2] or None)
    return PodTopic(topic, None)


def is_ours_to_bind(endpoint: str) -> bool:
    """Whether a reader has to bind an address: one with a wildcard, which nobody could connect to."""
    return not endpoint.startswith(IN_ONE_PLACE) and any(
        f"//{wildcard}:" in endpoint or f"//[{wildcard}]:" in endpoint for wildcard in _WILDCARDS
    )


def is_ipv6(endpoint: str) -> bool:
    """Whether an address is one of IPv6, in brackets. A name is looked up as one of IPv4: where it had both, ZMQ would
    try the IPv6 one only, and engines listen on IPv4 unless told otherwise.
    """
    return endpoint.startswith("tcp://[")


def endpoint_of_rank(endpoint: str, offset: int, field: str = "endpoint") -> str:
    """Address of another DP rank: the port counts up, an `inproc` name gets a suffix. Raises InvalidValueError."""
    if offset == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{offset}"
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or int(port) + offset > _MAX_PORT:
        raise InvalidValueError(field, endpoint, f"tcp://HOST:PORT with a port of at most {_MAX_PORT - offset}")
    return f"{host}:{int(port) + offset}"
