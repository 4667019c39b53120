"""Recordings of engines: event batches and requests with what the engine reused, in the order in which they happened.

Needs only msgspec, so that it can be imported inside an engine's environment.
"""

import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import msgspec


class Registration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine's registration must say, because no event says it."""

    eagle: bool = False
    """The engine drops one more block, because a drafter needs its hidden states."""
    count_copies: bool = True
    """False: stores may be repeated without another copy of the block."""
    attention_chunk_size: int | None = None
    """Tokens of a chunk of its chunked local attention."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded."""

    engine: str
    version: str
    model: str
    """Its attention groups in words, such as `full 32, window 128 / 32`."""
    block_size: int
    """The pages of the index: the greatest common divisor of the groups' block sizes."""
    num_workers: int = 1
    registration: Registration = Registration()


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """One message of an engine's live stream."""

    worker: int
    seq: int
    payload: bytes


class Restarted(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """The engine was killed and started again: empty, with sequence numbers from 0 on."""

    worker: int


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """One request that came after all batches before it and before all batches after it."""

    worker: int
    prompt: list[int]
    salt: str
    """Its cache salt; empty if it has none."""
    reused: int
    """Tokens that the engine reused."""


class Rendering(msgspec.Struct, frozen=True, array_like=True):
    """What the engine answers about the tokens of a body. The body may name media, which an answer contains, too."""

    path: str
    answer: bytes
    """JSON."""


class AskedText(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """One request whose prompt is text, in the same order."""

    worker: int
    body: bytes
    """JSON, as a client of OpenAI or Anthropic sends it."""
    rendering: Rendering | None
    """None: the body has tokens."""
    num_tokens: int
    """Of the prompt, as the engine counts them."""
    tokens: list[int] | None
    """Those from which the engine generated, if it says."""
    reused: int
    """Tokens that the engine reused."""


Step: TypeAlias = Batch | Restarted | Asked | AskedText


class _Recording(msgspec.Struct, frozen=True):
    header: Header
    steps: list[Step]


def write(path: Path, header: Header, steps: Iterable[Step]) -> int:
    """Write a recording. Returns its size in bytes."""
    data = lzma.compress(msgspec.msgpack.encode(_Recording(header, list(steps))), preset=9 | lzma.PRESET_EXTREME)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(data)


def read(path: Path) -> tuple[Header, list[Step]]:
    """Read a recording."""
    found = msgspec.msgpack.decode(lzma.decompress(path.read_bytes()), type=_Recording)
    return found.header, found.steps
