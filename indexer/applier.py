"""One record of the log: decode, admit, apply in slices, confirm. No I/O; the same for live use and replay."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from indexer.freshness import Freshness
from indexer.index import IndexFullError
from indexer.namespaces import Namespaces
from indexer.tenants import Arrival, TenantGate
from indexer.views import View
from kv_events.codec import DecodedBatch, decode_batch
from kv_events.errors import KvsightError, RecordRejectedError
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.log.event_log import EventLogWriter
from kv_events.records import Channel, LogRecord
from kv_events.runtime.rate_limited_logger import RateLimitedLogger

logger = logging.getLogger(__name__)

_SHOWN = 200
_MAX_FOLDER_BYTES = 64 * 2**20


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
        """Count and keep a rejected record."""
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
        if self._bytes_left < len(kept.payload):
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
            self._bytes_left -= len(kept.payload)

    def close(self) -> None:
        """Close the folder's log."""
        if self._writer is not None:
            self._writer.close()


class Applier:
    """Turns records into views."""

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
        """Called after each batch that was applied; must not raise."""
        self._limited_logger = RateLimitedLogger(logger, "a record is skipped")
        self.records = 0
        """Records of events seen."""

    def apply(self, record: LogRecord, heard_at: float, heard_tick: float | None = None) -> Iterator[None]:
        """Apply one record in slices. A record that breaks the contract becomes a dead letter.

        Records of other channels than EVENTS are ignored.

        heard_at: time at which the record was received, in seconds since 1970. heard_tick: the same moment on the clock
        of `Freshness` (default: the same number).
        """
        if record.channel != Channel.EVENTS:
            return
        self.records += 1
        tick = heard_at if heard_tick is None else heard_tick
        try:
            yield from self._apply(decode_batch(record.payload), record.partition, heard_at, tick)
        except RecordRejectedError as error:
            self.dead_letters.put(record, error)
        except IndexFullError as error:
            self.dead_letters.put(record, RecordRejectedError("index_full", str(error)))
        except Exception as error:  # noqa: BLE001  (whatever is wrong with it, one record must not stop all workers)
            self._limited_logger.warning("an error that kvsight should not have: %r", error, error=error)
            self.dead_letters.put(record, RecordRejectedError("internal", repr(error)))

    def _apply(self, batch: DecodedBatch, partition: int, heard_at: float, heard_tick: float) -> Iterator[None]:
        view = self.namespaces.view(batch.stream)
        is_silent = view is not None and self.freshness is not None and self.freshness.is_silent(view, heard_tick)
        if view is not None and view.block_size != batch.block_size:
            if batch.epoch <= view.epoch and not is_silent:
                detail = f"{batch.stream.key} has {view.block_size} since a later or the same epoch"
                raise RecordRejectedError("block_size", f"block_size: got {batch.block_size}, {detail}")
            yield from self.namespaces.forget(batch.stream)  # a new incarnation with another page size
            view = self.namespaces.view(batch.stream)
            if view is not None:
                raise IndexFullError("holder sets, so that the old pages stay", 0)
        if view is None:
            arrival = Arrival(batch, heard_at, heard_tick)
            if self._tenants and not (yield from self._tenants.admits(self.namespaces, arrival, self.freshness)):
                return
            yield from self.namespaces.make_room(batch.stream, batch.block_size)
            view = self.namespaces.add_view(batch.stream, batch.block_size)
        if self._tenants is not None:
            yield from self._tenants.bound_pages(self.namespaces, view, heard_tick, self.freshness)
        if view.admit(batch, is_silent=is_silent):
            view.partition = partition
            view.note_arrival(batch, heard_at, heard_tick)
            try:
                yield from view.apply(batch)
            except Exception:
                view.mark_stale("internal error")
                raise
            view.compare_digest(batch)
            for notify in self.on_applied:
                notify(view, batch)
