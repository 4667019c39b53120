"""Conversion of all views and log positions to bytes and back.

Layout: the eight bytes `KVSNAP01`, a CRC-32 of the remaining bytes (4 bytes, little-endian), then one msgpack array as
declared by `_Image`. Columns are little-endian arrays as bytes.
"""

import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from indexer.index import IndexImage
from indexer.namespaces import Namespace, Namespaces
from indexer.position import Position
from indexer.settings import IndexerSettings
from indexer.snapshots.base import Piece, SnapshotDamagedError
from indexer.views import RESYNC_CUT_OFF, View, ViewCounters, ViewState
from kv_events.digest import DIGEST_WORDS, digest_bytes
from kv_events.errors import InvalidValueError, KvsightError
from kv_events.limits import MAX_NAME_BYTES
from kv_events.schema import NUM_MEDIA
from kv_events.streams import StreamId

_MAGIC = b"KVSNAP01"
_HEADER_BYTES = len(_MAGIC) + 4


class _ExactImage(msgspec.Struct, frozen=True, array_like=True):
    """What a replay needs in addition to continue exactly, in place of a consumer that meets the present."""

    last_batch_tick: float
    first_missing: int | None
    refused_now: int
    resync_began: float
    marks: bytes | None
    """One byte for each page of the namespace, if a resync is in progress."""
    agreed_at: float
    missing_batches: int
    lateness: tuple[float, ...]
    silent_from: float
    is_delayed: bool


EXACT_FIELDS = (
    *("last_batch_tick", "refused_now", "resync_began", "agreed_at"),
    *("missing_batches", "silent_from", "is_delayed", "lateness"),
)
"""Fields of a view that an exact image has as they are."""


class _ViewImage(msgspec.Struct, frozen=True, array_like=True):
    worker: str
    dp_rank: int
    number: int
    epoch: int
    next_seq: int
    last_batch_at: float
    state: ViewState
    stale_reason: str
    counters: ViewCounters
    digest: bytes
    degraded_reason: str = ""
    exact: _ExactImage | None = None


class _NamespaceImage(msgspec.Struct, frozen=True, array_like=True):
    model: str
    tenant: str
    block_size: int
    views: list[_ViewImage]
    hashes: memoryview
    parents: memoryview
    holders: memoryview
    sets: memoryview
    words_per_set: int


class _Image(msgspec.Struct, frozen=True, array_like=True):
    taken_at: float
    positions: dict[int, int]
    namespaces: list[_NamespaceImage]


class Snapshot(NamedTuple):
    """A decoded snapshot."""

    namespaces: Namespaces
    positions: dict[int, int]
    """Partition -> offset of the first record that is not in the views."""
    taken_at: float
    """Seconds since 1970."""


class SnapshotParts:
    """A snapshot in pieces of at most some hundred kilobytes, copied out of the live views.

    To join them, or to free all of them at once, would hold the interpreter for many milliseconds.
    """

    def __init__(self, pieces: deque[Piece]) -> None:
        """pieces: what follows the header."""
        self._pieces = pieces

    def pack(self) -> Iterator[Piece]:
        """Return the pieces of the snapshot, once. Each is forgotten when it is taken. May run on any thread."""
        checksum = 0
        for piece in self._pieces:
            checksum = zlib.crc32(piece, checksum)
        self._pieces.appendleft(_MAGIC + checksum.to_bytes(4, "little"))
        return _taken(self._pieces)


def _taken(pieces: deque[Piece]) -> Iterator[Piece]:
    while pieces:
        yield pieces.popleft()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Image)


def take(
    namespaces: Namespaces, positions: Mapping[int, int], now: float, *, is_exact: bool = False
) -> Generator[None, None, SnapshotParts]:
    """Copy everything out of the views, slice by slice.

    Start between two records and apply no record before the end. A view during a resync is saved as stale, unless
    is_exact: the views are then restored with everything on which the next records depend.
    """
    pieces: deque[Piece] = deque([_array(len(_Image.__struct_fields__))])
    pieces += [_encoder.encode(now), _encoder.encode(dict(positions)), _array(namespaces.num_namespaces)]
    for namespace in namespaces:
        yield from _copy_namespace(namespace, pieces, is_exact)
    return SnapshotParts(pieces)


def _copy_namespace(namespace: Namespace, pieces: deque[Piece], is_exact: bool) -> Iterator[None]:
    """Append the encoded `_NamespaceImage`."""
    index = yield from namespace.index.image()
    begin = bytearray(_array(len(_NamespaceImage.__struct_fields__)))
    for part in namespace.key:
        begin += _encoder.encode(part)
    begin += _array(len(namespace.views))
    for view in namespace.views.values():
        begin += _encoder.encode(_view_image(view, is_exact))
        yield
    pieces.append(begin)
    columns: tuple[list[npt.NDArray[Any]], ...] = (index.hashes, index.parents, index.holders, index.sets)
    for column in columns:
        pieces.append(b"\xc6" + sum(part.nbytes for part in column).to_bytes(4, "big"))  # bin 32 of msgpack
        pieces += [part.reshape(-1).view(np.uint8).data for part in column]
    pieces.append(_encoder.encode(index.words_per_set))


def _array(length: int) -> bytes:
    """Return the beginning of an array of msgpack."""
    return b"\xdd" + length.to_bytes(4, "big")


def unpack(data: bytes, settings: IndexerSettings) -> Snapshot:
    """Decode a snapshot into new views. Raises SnapshotDamagedError."""
    body = check(data)
    try:
        image = _decoder.decode(body)
        namespaces = Namespaces(settings)
        for part in image.namespaces:
            _restore(namespaces, part)
    except (msgspec.DecodeError, KvsightError, ValueError, OverflowError, RecursionError) as error:
        raise SnapshotDamagedError(str(error)) from error
    return Snapshot(namespaces, image.positions, image.taken_at)


def check(data: bytes) -> memoryview:
    """Check the checksum of a snapshot. Returns what it covers. Raises SnapshotDamagedError."""
    body = memoryview(data)[_HEADER_BYTES:]
    if data[: len(_MAGIC)] != _MAGIC:
        raise SnapshotDamagedError(f"begins with {data[: len(_MAGIC)]!r}, expected {_MAGIC!r}")
    stated = int.from_bytes(data[len(_MAGIC) : _HEADER_BYTES], "little")
    if zlib.crc32(body) != stated:
        raise SnapshotDamagedError(f"checksum {zlib.crc32(body):08x}, expected {stated:08x}")
    return body


def _view_image(view: View, is_exact: bool) -> _ViewImage:
    state, reason = view.state, view.stale_reason
    if state is ViewState.SYNCING and not is_exact:
        state, reason = ViewState.STALE, RESYNC_CUT_OFF
    return _ViewImage(
        view.stream.worker,
        view.stream.dp_rank,
        view.number,
        view.epoch,
        view.next_seq,
        view.last_batch_at,
        state,
        reason,
        view.counters,
        digest_bytes(view.index.digest(view.number)),
        view.degraded_reason,
        _exact_image(view) if is_exact else None,
    )


def _exact_image(view: View) -> _ExactImage:
    marks = None if view.marks is None else view.marks[view.index.live_entries()].tobytes()
    fields = {name: getattr(view, name) for name in EXACT_FIELDS}
    return _ExactImage(first_missing=view.position.first_missing, marks=marks, **fields)


def _restore(namespaces: Namespaces, part: _NamespaceImage) -> None:
    for name in (part.model, part.tenant, *(v.worker for v in part.views)):
        if not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
            raise InvalidValueError("image", name, f"names of 1 .. {MAX_NAME_BYTES} bytes")
    digests = {v.number: np.frombuffer(v.digest, "<u8", DIGEST_WORDS).copy() for v in part.views}
    words_per_set = max(part.words_per_set, NUM_MEDIA)
    sets = np.frombuffer(part.sets, "<u8").reshape(-1, words_per_set)
    namespace = namespaces.add_namespace(part.model, part.tenant, part.block_size)
    namespace.index.restore(
        IndexImage(
            [np.frombuffer(part.hashes, "<u8")],
            [np.frombuffer(part.parents, "<u8")],
            [np.frombuffer(part.holders, "<u4")],
            [sets],
            words_per_set,
            digests,
        )
    )
    for v in part.views:
        stream = StreamId(part.model, part.tenant, v.worker, v.dp_rank)
        view = View(stream, part.block_size, namespace.index, v.number, namespace.columns, v.stale_reason)
        view.position, view.counters = Position(v.epoch, v.next_seq), v.counters
        view.state, view.last_batch_at, view.degraded_reason = v.state, v.last_batch_at, v.degraded_reason
        view.agreed_at = v.last_batch_at if v.state is ViewState.LIVE else 0.0
        if v.exact is not None:
            _restore_exactly(view, v.exact)
        namespaces.adopt(namespace, view)


def _restore_exactly(view: View, exact: _ExactImage) -> None:
    for name in EXACT_FIELDS:
        setattr(view, name, getattr(exact, name))
    view.position = view.position._replace(first_missing=exact.first_missing)
    if exact.marks is not None:
        view.marks = view.index.new_marks()
        view.marks[view.index.live_entries()] = np.frombuffer(exact.marks, np.uint8)
