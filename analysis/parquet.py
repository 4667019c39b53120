"""Events and views as Parquet files, for queries in SQL or with data frames. Needs `pyarrow` (extra `analysis`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from indexer.replay import Replay
from kv_events.codec import DecodedBatch, RemovedPages, Step, StoredPages, decode_batch
from kv_events.errors import RecordRejectedError
from kv_events.hashing import U64Array
from kv_events.records import Channel, LogRecord
from kv_events.schema import MEDIA, AllBlocksCleared, SnapshotBegin, SnapshotEnd

_GROUP_ROWS = 500_000
_NAME = pa.dictionary(pa.int32(), pa.string())

EVENTS = pa.schema(
    [
        ("index", pa.int64()),
        ("partition", pa.int64()),
        ("offset", pa.int64()),
        ("time", pa.timestamp("ms", "UTC")),
        ("model", _NAME),
        ("tenant", _NAME),
        ("worker", _NAME),
        ("dp_rank", pa.int32()),
        ("epoch", pa.int64()),
        ("seq", pa.int64()),
        ("event", _NAME),
        ("medium", _NAME),
        ("sequence_hash", pa.uint64()),
        ("block_hash", pa.uint64()),
        ("parent_hash", pa.uint64()),
    ]
)
"""Columns of the events: a row for each page that is stored or removed, and one for each other event of a batch.

`event`: stored, removed, cleared, resync_begin or resync_end. `parent_hash`: sequence hash of the page before; 0 at the
beginning of a prompt. The columns of pages are null for other events than stored and removed.
"""

VIEWS = pa.schema(
    [
        ("model", _NAME),
        ("tenant", _NAME),
        ("worker", _NAME),
        ("dp_rank", pa.int32()),
        ("block_size", pa.int32()),
        ("state", _NAME),
        ("sequence_hash", pa.uint64()),
        ("parent_hash", pa.uint64()),
        *((medium.value.lower().removesuffix("_pinned"), pa.bool_()) for medium in MEDIA),
    ]
)
"""Columns of the views: a row for each page that a worker stream holds, with a column for each medium."""


def write_events(path: Path, records: Iterable[tuple[int, LogRecord]]) -> int:
    """Write the events of some records, which are (index, record). Returns the number of rows.

    Records that cannot be decoded, and those of other channels, are left out. Raises OSError.
    """
    return _write(path, EVENTS, _event_tables(records))


def write_views(path: Path, views: Replay) -> int:
    """Write the pages of all views. Returns the number of rows. Raises OSError."""
    return _write(path, VIEWS, _view_tables(views))


def _write(path: Path, schema: Any, tables: Iterator[Any]) -> int:
    num_rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)
            num_rows += table.num_rows
    return num_rows


def _event_tables(records: Iterable[tuple[int, LogRecord]]) -> Iterator[Any]:
    """Yield tables of about half a million rows, so that memory is bounded."""
    rows = _EventRows()
    for index, record in records:
        if record.channel != Channel.EVENTS:
            continue
        try:
            batch = decode_batch(record.payload)
        except RecordRejectedError:
            continue
        for step in batch.steps:
            rows.add(index, record, batch, step)
        if rows.num_rows >= _GROUP_ROWS:
            yield rows.table()
            rows = _EventRows()
    yield rows.table()


class _EventRows:
    """Rows of the events: facts of each event, which are repeated for its pages, and columns of pages."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._facts: list[tuple[Any, ...]] = []  # one row for each event, in the order of EVENTS; then its length
        self._pages: list[tuple[U64Array, U64Array, U64Array]] = []  # sequence hashes, block hashes, parents

    def add(self, index: int, record: LogRecord, batch: DecodedBatch, step: Step) -> None:
        """Add the rows of one event."""
        match step:
            case StoredPages():
                event, medium, pages = (
                    "stored",
                    MEDIA[step.medium].value,
                    (step.hashes, step.block_hashes, _parents(step)),
                )
            case RemovedPages():
                event, medium, pages = (
                    "removed",
                    MEDIA[step.medium].value,
                    (step.hashes, step.block_hashes, step.hashes),
                )
            case _:
                event, medium, pages = _OTHER_EVENTS[type(step)], "", (_NO_PAGE,) * 3
        place = (index, record.partition, record.offset, record.timestamp_ms)
        self._facts.append((*place, *batch.stream, batch.epoch, batch.seq, event, medium, len(pages[0])))
        self._pages.append(pages)
        self.num_rows += len(pages[0])

    def table(self) -> Any:
        """Return all rows."""
        columns = list(zip(*self._facts, strict=True)) if self._facts else [()] * (len(EVENTS) - 2)
        *facts, lengths = columns
        events = np.repeat(np.array(facts[10], "U12"), lengths)
        hashes, blocks, parents = (np.concatenate([_NO_PAGE[:0], *each]) for each in _transposed(self._pages))
        has_no_page = (events != "stored") & (events != "removed")
        arrays = [_repeated(values, lengths, field) for values, field in zip(facts, EVENTS, strict=False)]
        arrays += [pa.array(column, mask=has_no_page) for column in (hashes, blocks)]
        return pa.table([*arrays, pa.array(parents, mask=events != "stored")], schema=EVENTS)


_NO_PAGE = np.zeros(1, np.uint64)
_OTHER_EVENTS = {AllBlocksCleared: "cleared", SnapshotBegin: "resync_begin", SnapshotEnd: "resync_end"}


def _transposed(pages: list[tuple[U64Array, U64Array, U64Array]]) -> list[tuple[U64Array, ...]]:
    return list(zip(*pages, strict=True)) if pages else [(), (), ()]


def _repeated(values: Sequence[Any], lengths: Sequence[int], field: Any) -> Any:
    """Return a column in which each value is repeated. Empty names become null."""
    if not pa.types.is_dictionary(field.type):
        return pa.array(np.repeat(np.array(values, np.int64), lengths)).cast(field.type)
    names, codes = np.unique(np.array(values, np.str_), return_inverse=True)
    codes = np.repeat(codes.astype(np.int32), lengths)
    return pa.DictionaryArray.from_arrays(
        pa.array(codes, mask=names[codes] == ""), pa.array(names.tolist(), pa.string())
    )


def _parents(step: StoredPages) -> U64Array:
    """Return the sequence hash of the page before each page."""
    parents = np.empty(len(step.hashes), np.uint64)
    parents[1:] = step.hashes[:-1]
    starts = np.unpackbits(step.chain_starts, count=len(step.hashes), bitorder="little").astype(np.bool_)
    parents[starts] = step.parents
    return parents


def _view_tables(views: Replay) -> Iterator[Any]:
    for view in views.namespaces.views:
        stream = view.stream
        facts = (*stream, view.block_size, views.freshness.state(view).value)
        for part in view.index.stream_pages(view.number):
            arrays = [_repeated([fact], [len(part.hashes)], field) for fact, field in zip(facts, VIEWS, strict=False)]
            held = [pa.array((part.tiers >> tier & 1).astype(np.bool_)) for tier in range(len(MEDIA))]
            yield pa.table([*arrays, pa.array(part.hashes), pa.array(part.parents), *held], schema=VIEWS)
