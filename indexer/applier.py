"""One record of the log: decode, admit, apply in slices, confirm. No I/O; the same for live use and replay."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from indexer.freshness import Freshness
from indexer.index import SLICE_PAGES, IndexFullError, OverlapIndex
from indexer.kernels.apply import Pages
from indexer.kernels.batches import DIGEST_DIFFERS, NO_SPACE, Arrivals, Space, Streams, apply_batches
from indexer.kernels.views import ViewColumns
from indexer.namespaces import NamespaceKey, Namespaces
from indexer.tenants import TenantGate
from indexer.views import View
from kv_events.codec import DecodedBatch, decode_batch
from kv_events.errors import KvsightError, RecordRejectedError
from kv_events.kernels.batches import TIME
from kv_events.kernels.bundles import I64Vector, pin
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.log.event_log import EventLogWriter
from kv_events.log.format import RECORD_BYTES
from kv_events.log.reader import BatchColumns, RecordChunk, decode_chunk
from kv_events.records import Channel, LogRecord
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.streams import StreamId

logger = logging.getLogger(__name__)

_SHOWN = 200
_MAX_FOLDER_BYTES = 64 * 2**20
_MOST_NAMES = 65_536
_PUNCTUAL_S = 0.25  # well below what `indexer.views` takes for late

_ARRAY_OF_FIVE = b"\x95"
_decode_names = msgspec.msgpack.Decoder(tuple[str, str, str, int, int]).decode

Mask: TypeAlias = npt.NDArray[np.bool_]


class DeadLetters:
    """Counts rejected records by reason, and logs the first one of each reason.

    If there is a folder, the records are written to it as an event log of at most 64 MiB. Further records are only
    counted.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.on_put: list[Callable[[LogRecord], None]] = []
        """Called with each rejected record, in the channel of dead letters."""
        self._is_full = False
        self._writer = EventLogWriter(folder) if folder is not None else None
        self._bytes_left = _MAX_FOLDER_BYTES - (
            sum(f.stat().st_size for f in folder.iterdir()) if folder is not None else 0
        )

    def put(self, record: LogRecord, error: RecordRejectedError) -> None:
        self.counts[error.reason] += 1
        if self.counts[error.reason] == 1:
            key = record.key[:_SHOWN].decode(errors="replace")
            detail = error.detail[:_SHOWN]
            logger.warning(
                "record %d/%d rejected: %s: %s (%s)", record.partition, record.offset, error.reason, detail, key
            )
        if self._writer is not None:
            self._write(self._writer, record)
        for notify in self.on_put:
            notify(record._replace(channel=Channel.DEAD_LETTERS))

    def _write(self, writer: EventLogWriter, record: LogRecord) -> None:
        """Write a record to the folder, cut to what an event log accepts. A failure is only logged."""
        kept = record._replace(
            key=record.key[:_SHOWN], payload=record.payload[:MAX_RECORD_BYTES], channel=Channel.DEAD_LETTERS
        )
        num_bytes = RECORD_BYTES + len(kept.key) + len(kept.payload)
        if self._bytes_left < num_bytes:
            if not self._is_full:
                logger.warning("the dead-letter folder is full; further records are only counted")
            self._is_full = True
            return
        try:
            writer.append(kept)
            writer.flush(sync=False)
        except (KvsightError, OSError) as error:
            logger.warning("a dead letter was not written: %s", error)
        else:
            self._bytes_left -= num_bytes

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Batches(NamedTuple):
    """The batches of consecutive records, some of which are applied at once."""

    columns: BatchColumns
    arrivals: Arrivals
    first_index: int
    """Index of the record of row 0."""


class PlainRun(NamedTuple):
    """Plain batches that were applied. Their views were live before and after each of them."""

    batches: Batches
    rows: I64Vector
    """The rows of the batches, ascending."""
    views: Mapping[int, View]
    """By the numbers in `Arrivals.streams`."""

    def newest(self) -> Iterator[tuple[View, int]]:
        """Yield each view and the row of its last batch."""
        numbers, places = np.unique(self.batches.arrivals.streams[self.rows[::-1]], return_index=True)
        rows = self.rows[len(self.rows) - 1 - places]
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            yield self.views[number], row


class Applier:
    """Turns records into views: any record in slices, or the plain batches of many records by a kernel.

    Both change the same columns of the views, so they can be mixed in any way. A batch is *plain* for the kernel if
    it is plain for `BatchColumns`, punctual, and the next one of a live view whose publisher's clock agrees with ours.
    """

    def __init__(
        self,
        namespaces: Namespaces,
        dead_letters: DeadLetters,
        freshness: Freshness | None = None,
        tenants: TenantGate | None = None,
    ) -> None:
        """freshness: None: no worker is ever silent. tenants: None: tenants have no limits of their own."""
        self.namespaces = namespaces
        self.dead_letters = dead_letters
        self.freshness = freshness
        self._tenants = tenants
        self.on_applied: list[Callable[[View, DecodedBatch], None]] = []
        """Called after each batch that was applied, except those that `apply_plain` applies; must not raise."""
        self._limited_logger = RateLimitedLogger(logger, "a record is skipped")
        self.records = 0
        """Records of events seen."""
        self._places = _Places()

    def apply(self, record: LogRecord, at: float, tick: float | None = None) -> Iterator[None]:
        """Apply one record in slices. A record that breaks the contract becomes a dead letter.

        Records of other channels than EVENTS are ignored.

        at: time at which the record was received, in seconds since 1970. tick: the same moment on the clock of
        `Freshness` (default: the same number).
        """
        if record.channel != Channel.EVENTS:
            return
        self.records += 1
        try:
            yield from self._apply(decode_batch(record.payload), record.partition, at, at if tick is None else tick)
        except RecordRejectedError as error:
            self.dead_letters.put(record, error)
        except IndexFullError as error:
            self.dead_letters.put(record, RecordRejectedError("index_full", str(error)))
        except Exception as error:  # noqa: BLE001  (whatever is wrong with it, one record must not stop all workers)
            self._limited_logger.warning("an error that kvsight should not have: %r", error, error=error)
            self.dead_letters.put(record, RecordRejectedError("internal", repr(error)))

    def _apply(self, batch: DecodedBatch, partition: int, at: float, tick: float) -> Iterator[None]:
        view = self.namespaces.view(batch.stream)
        is_silent = view is not None and self.freshness is not None and self.freshness.is_silent(view, tick)
        if view is not None and view.block_size != batch.block_size:
            if batch.epoch <= view.epoch and not is_silent:
                detail = f"{batch.stream.key} has {view.block_size} since a later or the same epoch"
                raise RecordRejectedError("block_size", f"block_size: got {batch.block_size}, {detail}")
            yield from self.namespaces.forget(batch.stream)  # a new incarnation with another page size
            view = self.namespaces.view(batch.stream)
            if view is not None:
                raise IndexFullError("holder sets, so that the old pages stay", 0)
        if view is None:
            gate = self._tenants
            if gate is not None and not (yield from gate.admits(self.namespaces, batch, at, tick, self.freshness)):
                return
            yield from self.namespaces.make_room(batch.stream, batch.block_size)
            view = self.namespaces.add_view(batch.stream, batch.block_size)
        if self._tenants is not None:
            yield from self._tenants.bound_pages(self.namespaces, view, tick, self.freshness)
        if view.admit(batch, is_silent=is_silent):
            view.partition = partition
            view.note_arrival(batch, at, tick)
            try:
                yield from view.apply(batch)
            except Exception:
                view.mark_stale("internal error")
                raise
            self.finish(view, batch)

    def finish(self, view: View, batch: DecodedBatch) -> None:
        """Do what remains to be done after the events of a batch."""
        view.compare_digest(batch)
        for notify in self.on_applied:
            notify(view, batch)

    # --- many records at once ---------------------------------------------------------------------------------------

    def decode(self, chunk: RecordChunk, start: int, wanted: Mask) -> Batches:
        """Decode the records of a chunk from row `start` on. Their times are those at which they were received.

        wanted: bool[n] which of them to apply. Others than events are not applied.
        """
        stop = start + len(wanted)
        columns, at = decode_chunk(chunk, start, stop), chunk.timestamps_ms[start:stop] / 1000
        made_at, plain = columns.arrays.batches[:, TIME].view(np.float64).copy(), columns.arrays.plain
        with np.errstate(all="ignore"):  # those that are not plain may have any time
            plain[np.abs(made_at - at) > _PUNCTUAL_S] = 0
        wanted = wanted & (chunk.channels[start:stop] == Channel.EVENTS)
        streams = self._places.rows_of(columns.names(), self.namespaces)
        return Batches(columns, Arrivals(wanted, streams, made_at, at, at), chunk.first_index + start)

    def apply_plain(self, batches: Batches, start: int) -> tuple[PlainRun, int, bool]:
        """Apply plain batches from row `start` on, up to a wanted record that is not plain.

        Returns them, the row of that record, and whether the events of that record are applied, so that only `finish`
        remains. `note_applied` must be called after that record.
        """
        columns, wanted = batches.columns, batches.arrivals.wanted
        data = np.frombuffer(columns.data, np.uint8)
        end, reason = apply_batches(data, columns.arrays, batches.arrivals, self._places.streams, start, SLICE_PAGES)
        is_open = reason == DIGEST_DIFFERS
        row = end - is_open
        rows = start + np.flatnonzero(wanted[start:row])
        self.records += len(rows) + is_open
        return PlainRun(batches, rows, self._places.views), row, is_open

    def finish_plain(self, batches: Batches, row: int, payload: bytes) -> None:
        """Do what remains to be done after a batch whose events `apply_plain` has applied."""
        self.finish(self._places.views[batches.arrivals.streams.item(row)], decode_batch(payload))

    def note_applied(self, batches: Batches, row: int) -> None:
        """Note that a record which is not plain was applied: its stream may have a view now."""
        self._places.look_up(batches.arrivals.streams.item(row), self.namespaces)


class _Places:
    """Where the views of streams are, by the encoded names in batches."""

    def __init__(self) -> None:
        self.views: dict[int, View] = {}
        self.streams = Streams(np.zeros((0, 2), np.int64), np.zeros((0, 0), np.uint64), np.zeros(0, np.uint8))
        self._rows: dict[bytes, int] = {}  # encoded names, with the block size -> row of the places
        self._names: list[tuple[StreamId, int] | None] = []  # the same decoded; None: they cannot be decoded
        self._spaces: dict[NamespaceKey, tuple[int, Pages]] = {}  # row of the spaces, and what it was made of
        self._as_of: tuple[Namespaces, int] | None = None

    def rows_of(self, names: Sequence[bytes | None], namespaces: Namespaces) -> I64Vector:
        """Return the row of each stream; -1 if its names are unreadable."""
        if len(self._rows) > _MOST_NAMES:
            self._rows.clear()
            self._names.clear()
            self._as_of = None  # rows get other names, so no place may remain
        self._forget_dropped(namespaces)
        num_known, known = len(self._names), self._rows
        rows = np.array([-1 if name is None else known.setdefault(name, len(known)) for name in names], np.int64)
        for name in islice(known, num_known, None):
            self._names.append(_decoded(name))
        places = self.streams.places
        if len(known) > len(places):
            places = np.concatenate((places, np.full((2 * len(known) - len(places), 2), NO_SPACE, np.int64)))
            self.streams = self.streams._replace(places=places)
        self._refresh(namespaces)
        for row in range(num_known, len(known)):
            self.look_up(row, namespaces)
        return rows

    def look_up(self, row: int, namespaces: Namespaces) -> None:
        """Find the view of a stream, and the arrays of all namespaces, which its record may have replaced."""
        self._refresh(namespaces)
        names = self._names[row] if row >= 0 else None
        view = None if names is None else namespaces.view(names[0])
        if names is not None and view is not None and view.block_size == names[1]:
            key = NamespaceKey(view.stream.model, view.stream.tenant, view.block_size)
            self.streams.places[row] = self._space(key, view.index, view.columns), view.number
            self.views[row] = view

    def _refresh(self, namespaces: Namespaces) -> None:
        self._forget_dropped(namespaces)
        for namespace in namespaces:
            if namespace.key in self._spaces:
                self._space(namespace.key, namespace.index, namespace.columns)

    def _space(self, key: NamespaceKey, index: OverlapIndex, columns: ViewColumns) -> int:
        """Return the row of a namespace. Its arrays may be others now."""
        row, pages = self._spaces.get(key, (len(self._spaces), None))
        if pages is not index.pages:
            words, spaces = pin(Space(index.pages, columns)), self.streams.spaces
            if row == len(spaces):
                spaces = np.concatenate((spaces.reshape(-1, len(words)), np.zeros((row + 1, len(words)), np.uint64)))
                self.streams = self.streams._replace(spaces=spaces)
            spaces[row], self._spaces[key] = words, (row, index.pages)
        return row

    def _forget_dropped(self, namespaces: Namespaces) -> None:
        """Forget all places after a view was dropped. A stream is found again after its next record."""
        if self._as_of != (as_of := (namespaces, namespaces.num_dropped)):
            self._as_of = as_of
            self.streams.places[:] = NO_SPACE
            self.views.clear()
            self._spaces.clear()


def _decoded(names: bytes) -> tuple[StreamId, int] | None:
    """Return the stream and the block size of encoded names, or None if they are wrong."""
    try:
        model, tenant, worker, dp_rank, block_size = _decode_names(_ARRAY_OF_FIVE + names)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return StreamId(model, tenant, worker, dp_rank), block_size
