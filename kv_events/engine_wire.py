"""The engines' own event protocol over ZMQ: addresses, frames of replays, and topics. No sockets here.

vLLM defined the protocol and SGLang follows it. A PUB socket sends `topic, sequence number, batch`. A ROUTER socket
replays the batches that it still keeps, in one of two layouts, and ends an answer with a marker.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from kv_events.errors import InvalidValueError, KvsightError

SEQ_BYTES = 8
"""Length of a sequence number: an unsigned integer, big-endian."""
END = b"\xff" * SEQ_BYTES
"""Sequence number that ends a replay."""

Payload: TypeAlias = bytes | memoryview
"""An encoded batch. A large one is a view of the ZMQ message, which saves a copy."""


class FrameError(KvsightError):
    """A message does not have the frames of the protocol."""


def seq_frame(seq: int) -> bytes:
    return seq.to_bytes(SEQ_BYTES, "big")


def parse_replay(frames: Sequence[bytes]) -> tuple[int, Payload] | None:
    """Return the number and the payload of a replayed batch, or None for the end of a replay. Raises FrameError.

    Reads either layout, `seq, payload` or `topic, seq, payload`, behind an empty delimiter.
    """
    if not 2 <= len(frames) <= 4 or len(frames[-2]) != SEQ_BYTES:
        raise FrameError(f"{len(frames)} frames of {[len(frame) for frame in frames[:5]]} bytes")
    seq, payload = frames[-2:]
    return None if seq == END else (int.from_bytes(seq, "big"), payload)


def replay_request(start: int) -> list[bytes]:
    """The frames that ask for all kept batches from number `start` on."""
    return [b"", seq_frame(start)]


def parse_replay_request(frames: Sequence[bytes]) -> int:
    """First batch that a request asks for. frames: without the reader's identity. Raises FrameError."""
    if len(frames) != 2 or len(frames[1]) != SEQ_BYTES:
        raise FrameError(f"{len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes")
    return int.from_bytes(frames[1], "big")


def parse_topic(topic: str) -> tuple[str, str | None]:
    """Pod and model of a topic by llm-d's convention, `kv@<pod>@<model>`. One of another form is a pod's name."""
    parts = topic.split("@")
    if len(parts) == 3 and parts[0] == "kv":
        return parts[1], parts[2] or None
    return topic, None


# --- addresses: which side binds them, and how the ports of DP ranks follow from the first one ----------------------

LOCAL_SCHEMES = ("ipc://", "inproc://")
"""Prefixes of addresses on one machine. They have no wildcard."""

_MAX_PORT = 65_535
_WILDCARDS = ("*", "::", "0.0.0.0")  # noqa: S104  (looked for, not bound to)

Locate: TypeAlias = Callable[[str], Awaitable[str]]
"""Returns where to connect for an endpoint at this moment. Raises LocateError."""


class LocateError(KvsightError):
    """An endpoint leads nowhere at present."""


async def as_given(endpoint: str) -> str:
    """Leave the look-up of names to ZMQ. A `Locate`."""
    return endpoint


def has_wildcard(endpoint: str) -> bool:
    """Whether the host is a wildcard. Such an address can be bound, but no peer can connect to it."""
    return not endpoint.startswith(LOCAL_SCHEMES) and any(
        f"//{wildcard}:" in endpoint or f"//[{wildcard}]:" in endpoint for wildcard in _WILDCARDS
    )


def is_ipv6(endpoint: str) -> bool:
    """Whether the host is an IPv6 address in brackets.

    A host name counts as IPv4. ZMQ would try only the IPv6 address of a name that has both, but engines listen on IPv4
    unless told otherwise.
    """
    return endpoint.startswith("tcp://[")


def endpoint_of_rank(endpoint: str, offset: int, field: str = "endpoint") -> str:
    """Address of the DP rank `offset` places after the first: port + offset, or an `inproc` name with a suffix.

    field: the setting that an error names. Raises InvalidValueError where the address has no such port.
    """
    if offset == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{offset}"
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or int(port) + offset > _MAX_PORT:
        raise InvalidValueError(field, endpoint, f"tcp://HOST:PORT with a port of at most {_MAX_PORT - offset}")
    return f"{host}:{int(port) + offset}"
