"""Events and records.

Two forms of one thing. *Engine events* (`BlockStored`, `BlockRemoved`, `AllBlocksCleared`) carry SGLang's names and
meaning; a cache emits them and `publish()` takes them. *Wire events* (`PackedStored`, `PackedRemoved`, ...) carry the
same pages column by column, hashes as little-endian bytes, inside an `EventBatch`, which is one record on the log.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
SCHEMA_VERSION = SCHEMA_MAJOR << 8 | SCHEMA_MINOR


class StorageMedium(str, Enum):  # noqa: UP042  (StrEnum's str() is wanted by nobody; the wire value is the contract)
    """Where a page lies, fastest first. Equal to, and serialised as, its string."""

    GPU = "GPU"
    CPU = "CPU_PINNED"
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"


MEDIA: tuple[StorageMedium, ...] = tuple(StorageMedium)
NUM_MEDIA = len(MEDIA)
MEDIUM_INDEX: dict[str, int] = {medium.value: i for i, medium in enumerate(MEDIA)}
"""Medium string -> tier index, 0 (fastest) to 3."""

TokenIds: TypeAlias = list[int] | list[tuple[int, int]]


class BlockStored(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Pages that became resident on `medium`, in prefix order, each the child of the one before it."""

    block_hashes: list[int]
    """The engine's 64-bit names of the pages, signed or unsigned; compared modulo 2**64."""
    parent_block_hash: int | None
    """Name of the page before the first one; None directly below the root."""
    token_ids: TokenIds
    """Tokens of all pages in a row; pairs in bigram mode. Empty when the engine does not say."""
    block_size: int
    """Logical units a page: tokens, or pairs in bigram mode."""
    lora_id: int | None = None
    medium: StorageMedium | None = None
    """None means GPU."""
    extra_key: str | None = None
    """Namespace of the pages inside their worker. Equal block hashes under two extra keys are two pages."""
    sequence_hashes: bytes = b""
    """The router's names of the pages, u64 little-endian in a row. Empty: the publisher derives them from the tokens.

    Bytes, because a cache makes one event a page: what the garbage collector need not look at costs half as much."""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Pages that left `medium`. Copies on other media stay."""

    block_hashes: list[int]
    medium: StorageMedium | None = None
    extra_key: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The worker holds nothing any more, on any medium."""


ENGINE_UNHEARD = "engine not heard"
"""Doubt of a publisher that cannot reach the engine it speaks for, or has not heard of it since it could."""
BATCHES_LOST = "batches lost"
"""Doubt of a publisher that missed events of its engine which are not to be had any more."""

EngineEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class PackedStored(msgspec.Struct, frozen=True, tag="BlockStored", array_like=True, gc=False):
    """n stored pages in m chains, on one medium. Inside a chain each page is the child of the one before it."""

    medium: StorageMedium
    sequence_hashes: bytes
    """n x u64, little-endian."""
    block_hashes: bytes
    """n x u64, little-endian."""
    chain_starts: bytes
    """Bitmap of ceil(n / 8) bytes, least significant bit first: bit i set = page i begins a chain. Bit 0 is set."""
    parents: bytes
    """m x u64, little-endian: sequence hash of the page before each chain; 0 directly below the root."""
    token_ids: bytes | None = None
    """u32, little-endian, the pages' tokens in a row (block_size a page; block_size + 1 in bigram mode)."""
    extra_key: str | None = None
    """Only together with `token_ids`: salts and LoRA names are nobody's business on the wire."""


class PackedRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved", array_like=True, gc=False):
    """n pages removed from one medium, in any order."""

    medium: StorageMedium
    sequence_hashes: bytes
    block_hashes: bytes


class SnapshotBegin(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """What follows, up to `SnapshotEnd`, names everything the worker holds."""

    reason: str = ""


class SnapshotEnd(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Pages that were not named since `SnapshotBegin` are not held. The batch's digest states the result."""


WireEvent: TypeAlias = PackedStored | PackedRemoved | AllBlocksCleared | SnapshotBegin | SnapshotEnd


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record of the log: what happened in one worker stream, in order."""

    schema_version: int
    """major << 8 | minor. Another major is refused; a newer minor may add trailing fields and event tags."""
    model: str
    tenant: str
    worker: str
    dp_rank: int
    block_size: int
    epoch: int
    """Incarnation of the publisher: nanoseconds since 1970 at its start. A larger epoch supersedes a smaller."""
    seq: int
    """0, 1, 2, ... without holes inside an epoch."""
    timestamp: float
    """Seconds since 1970, when the batch was closed."""
    events: list[msgspec.Raw]
    """`WireEvent`s. Empty: a heartbeat."""
    digest: bytes
    """See `kv_events.digest`: what the worker holds after this batch."""


class DoubtedBatch(EventBatch, frozen=True, array_like=True, gc=False):
    """A record whose publisher knows that its own knowledge of the worker is wanting. Naming all again would not help.

    A record of which that cannot be said is written without the field.
    """

    doubt: str = ""
    """In few words: `ENGINE_UNHEARD`, `BATCHES_LOST` or another. Empty: none."""


class ResyncRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Router side to publisher, on the control topic: name everything you hold again."""

    stream: str
    """`StreamId.key` of the worker stream."""
    epoch: int
    """The incarnation whose view was found wrong; a publisher of a newer epoch ignores the request."""
    reason: str = ""
