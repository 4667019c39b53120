"""Events and records.

Events have two forms. *Engine events* (`BlockStored`, `BlockRemoved`, `AllBlocksCleared`) have SGLang's names and
meaning; a cache emits them and `publish()` accepts them. *Wire events* (`PackedStored`, `PackedRemoved`, ...) contain
the same pages as columns, with hashes as little-endian bytes, inside an `EventBatch`, which is one record of the log.
"""

from enum import Enum
from typing import TypeAlias, TypeVar

import msgspec

from kv_events.errors import RecordRejectedError

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
SCHEMA_VERSION = SCHEMA_MAJOR << 8 | SCHEMA_MINOR


class StorageMedium(str, Enum):  # noqa: UP042  (the wire value is the contract, not StrEnum's str())
    """Media on which pages are stored, fastest first. Equal to, and serialised as, their strings."""

    GPU = "GPU"
    CPU = "CPU_PINNED"
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"


MEDIA: tuple[StorageMedium, ...] = tuple(StorageMedium)
NUM_MEDIA = len(MEDIA)
MEDIUM_INDEX: dict[str, int] = {medium.value: i for i, medium in enumerate(MEDIA)}
"""Medium string -> tier index, 0 (fastest) to 3."""
TIERS = ("gpu", "cpu", "disk", "external")
"""Short names of the media, in their order: in queries, answers, settings and columns."""

TokenIds: TypeAlias = list[int] | list[tuple[int, int]]


class BlockStored(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Pages that became resident on `medium`, in prefix order, each the child of the one before it."""

    block_hashes: list[int]
    """The engine's 64-bit identifiers of the pages, signed or unsigned; compared modulo 2**64."""
    parent_block_hash: int | None
    """Block hash of the page before the first one; None at the beginning of a prompt."""
    token_ids: TokenIds
    """Tokens of all pages, concatenated; pairs in bigram mode. Empty if the engine does not send them."""
    block_size: int
    """Logical units per page: tokens, or pairs in bigram mode."""
    lora_id: int | None = None
    medium: StorageMedium | None = None
    """None means GPU."""
    extra_key: str | None = None
    """Namespace of the pages inside their worker. Equal block hashes under two extra keys are two pages."""
    sequence_hashes: bytes = b""
    """Sequence hashes of the pages, u64 little-endian. If empty, the publisher computes them from the tokens.

    They are bytes because a cache creates one event for each page, and objects that the garbage collector does not
    track cost half as much.
    """


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Pages that were removed from `medium`. Copies on other media stay."""

    block_hashes: list[int]
    medium: StorageMedium | None = None
    extra_key: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The worker no longer holds any page, on any medium."""


ENGINE_UNHEARD = "engine not heard"
"""Degraded reason: the publisher cannot reach its engine, or has received nothing from it since it connected."""
BATCHES_LOST = "batches lost"
"""Degraded reason: the publisher missed events of its engine that are permanently lost. A number may follow."""
PAGES_LEFT_OUT = "pages left out"
"""Degraded reason: the publisher left out pages whose parents it does not know. Their number follows."""
REPLAYING = "replaying"
"""Degraded reason: the publisher applies batches that its engine sent some time ago."""
LEDGER_FULL = "ledger full"
"""Degraded reason: the publisher left pages out since its engine was last empty, because its ledger had no room."""

CLOSED = "closed"
"""Degraded reason of the last batch of an epoch: the publisher has been closed, and no batch follows."""


def counted_reason(reason: str) -> tuple[str, int]:
    """Return a degraded reason without the number that may follow it, and this number or 0."""
    kind, _, number = reason.rpartition(": ")
    return (kind, int(number)) if kind in (BATCHES_LOST, PAGES_LEFT_OUT) and number.isdecimal() else (reason, 0)


EngineEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class PackedStored(msgspec.Struct, frozen=True, tag="BlockStored", array_like=True, gc=False):
    """n stored pages in m chains, on one medium. Inside a chain each page is the child of the one before it."""

    medium: StorageMedium
    sequence_hashes: bytes
    """n x u64, little-endian."""
    block_hashes: bytes
    """n x u64, little-endian."""
    chain_starts: bytes
    """Bitmap of ceil(n / 8) bytes, least significant bit first. Bit i is set if page i begins a chain; bit 0 is set."""
    parents: bytes
    """m x u64, little-endian: sequence hash of the page before each chain; 0 at the beginning of a prompt."""
    token_ids: bytes | None = None
    """u32, little-endian: tokens of all pages, concatenated (block_size per page; block_size + 1 in bigram mode)."""
    extra_key: str | None = None
    """Only sent together with `token_ids`, because salts and LoRA names are private."""


class PackedRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved", array_like=True, gc=False):
    """n pages removed from one medium, in any order."""

    medium: StorageMedium
    sequence_hashes: bytes
    block_hashes: bytes


class SnapshotBegin(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Beginning of a resync: the events up to `SnapshotEnd` contain everything that the worker holds."""

    reason: str = ""


class SnapshotEnd(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """End of a resync: pages not stored since `SnapshotBegin` are not held. The batch's digest states the result."""


WireEvent: TypeAlias = PackedStored | PackedRemoved | AllBlocksCleared | SnapshotBegin | SnapshotEnd


class BatchHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of a batch in front of its events."""

    schema_version: int
    """major << 8 | minor. Another major is refused; a newer minor may add trailing fields and event tags."""
    model: str
    tenant: str
    worker: str
    dp_rank: int
    block_size: int
    epoch: int
    """Start time of the publisher in nanoseconds since 1970. A larger epoch supersedes a smaller one."""
    seq: int
    """0, 1, 2, ... without holes inside an epoch."""
    timestamp: float
    """Time up to which the batch tells what the worker held, in seconds since 1970.

    Changes that wait for later batches are not older.
    """


class EventBatch(BatchHead, frozen=True, array_like=True, gc=False):
    """One record of the log: consecutive events of one worker stream."""

    events: list[msgspec.Raw]
    """`WireEvent`s. Empty in a heartbeat."""
    digest: bytes
    """Digest of the pages that the worker holds after this batch; see `kv_events.digest`."""


class DegradedBatch(EventBatch, frozen=True, array_like=True, gc=False):
    """A record whose publisher may not know everything that its worker holds. A resync cannot repair this.

    A publisher with nothing to report writes an `EventBatch`, without the last field. On the wire a record is an array,
    so the field is known by its position: readers of versions that called it `doubt` understand it.
    """

    degraded_reason: str = ""
    """A short text: `ENGINE_UNHEARD`, `BATCHES_LOST`, `REPLAYING`, `LEDGER_FULL`, `CLOSED` or another. Empty: none."""


class ResyncRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message on the control topic: asks a publisher to resend everything that its worker holds."""

    stream: str
    """`StreamId.key` of the worker stream."""
    epoch: int
    """Epoch of the view that was found wrong. A publisher with a newer epoch ignores the request."""
    reason: str = ""


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""msgspec's errors for invalid bytes."""
_T = TypeVar("_T")


def decoded(data: bytes | msgspec.Raw, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """Decode what came from outside. Raises RecordRejectedError."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise RecordRejectedError("field", str(error)) from None
    except UNREADABLE as error:
        raise RecordRejectedError("msgpack", str(error)) from None
