"""Events and views as Parquet files, for queries in SQL or with data frames. Needs `pyarrow` (extra `analysis`)."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from indexer.replay import Replay
from kv_events.codec import RemovedPages, Step, StoredPages, batch_or_none
from kv_events.hashing import U64Array
from kv_events.records import Channel, LogRecord
from kv_events.schema import MEDIA, TIERS, AllBlocksCleared, SnapshotBegin, SnapshotEnd

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
        *((tier, pa.bool_()) for tier in TIERS),
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
    facts: list[tuple[Any, ...]] = []  # one row for each event, in the order of EVENTS
    pages: list[npt.NDArray[np.uint64]] = []  # [3, pages] of each event: sequence hashes, block hashes, parents
    num_rows = 0
    for index, record in records:
        batch = batch_or_none(record.payload) if record.channel == Channel.EVENTS else None
        if batch is None:
            continue
        place = (index, record.partition, record.offset, record.timestamp_ms, *batch.stream, batch.epoch, batch.seq)
        for step in batch.steps:
            event, medium, columns = _described(step)
            facts.append((*place, event, medium))
            pages.append(columns)
            num_rows += columns.shape[1]
        if num_rows >= _GROUP_ROWS:
            yield _table(facts, pages)
            facts, pages, num_rows = [], [], 0
    yield _table(facts, pages)


def _described(step: Step) -> tuple[str, str, npt.NDArray[np.uint64]]:
    """Return the event's name, its medium and the columns of its pages."""
    match step:
        case StoredPages():
            return "stored", MEDIA[step.medium].value, np.stack((step.hashes, step.block_hashes, _parents(step)))
        case RemovedPages():
            return "removed", MEDIA[step.medium].value, np.stack((step.hashes, step.block_hashes, step.hashes))
        case _:
            return _OTHER_EVENTS[type(step)], "", _NO_PAGE


def _table(facts: Sequence[tuple[Any, ...]], pages: Sequence[npt.NDArray[np.uint64]]) -> Any:
    """Return a table of events. facts: those of each event, which are repeated for its pages."""
    lengths = [columns.shape[1] for columns in pages]
    events = np.repeat(np.array([each[_EVENT] for each in facts], "U12"), lengths)
    hashes, blocks, parents = np.concatenate([_NO_PAGE[:, :0], *pages], axis=1)
    has_no_page = (events != "stored") & (events != "removed")
    arrays = _repeated(facts, EVENTS, lengths)
    arrays += [pa.array(column, mask=has_no_page) for column in (hashes, blocks)]
    return pa.table([*arrays, pa.array(parents, mask=events != "stored")], schema=EVENTS)


_NO_PAGE = np.zeros((3, 1), np.uint64)
_EVENT = EVENTS.get_field_index("event")
_OTHER_EVENTS = {AllBlocksCleared: "cleared", SnapshotBegin: "resync_begin", SnapshotEnd: "resync_end"}


def _repeated(rows: Sequence[tuple[Any, ...]], schema: Any, times: Sequence[int]) -> list[Any]:
    """Return the first columns of a schema, in which each row is repeated some times. Empty names become null."""
    columns = zip(*rows, strict=True) if rows else [()] * (_EVENT + 2)
    found = []
    for values, field in zip(columns, schema, strict=False):
        column = pa.array([None if value == "" else value for value in values], field.type)
        found.append(column.take(np.repeat(np.arange(len(rows)), times)))
    return found


def _parents(step: StoredPages) -> U64Array:
    """Return the sequence hash of the page before each page."""
    parents = np.empty(len(step.hashes), np.uint64)
    parents[1:] = step.hashes[:-1]
    starts = np.unpackbits(step.chain_starts, count=len(step.hashes), bitorder="little").astype(np.bool_)
    parents[starts] = step.parents
    return parents


def _view_tables(views: Replay) -> Iterator[Any]:
    for view in views.namespaces.views:
        facts = (*view.stream, view.block_size, views.freshness.state(view).value)
        for part in view.index.stream_pages(view.number):
            held = [pa.array((part.tiers >> tier & 1).astype(np.bool_)) for tier in range(len(MEDIA))]
            pages = [pa.array(part.hashes), pa.array(part.parents), *held]
            yield pa.table([*_repeated([facts], VIEWS, [len(part.hashes)]), *pages], schema=VIEWS)
