"""Batches of many records of an event log at once, as columns. Start at `decode_chunk`."""

from typing import NamedTuple

import numpy as np

from kv_events.kernels import batches
from kv_events.kernels.bundles import I64Matrix
from kv_events.log.reader import RecordChunk


class BatchColumns(NamedTuple):
    """The batches of consecutive records.

    A batch is *plain* if `kv_events.codec.decode_batch` accepts it with the same result, and if it has only stores and
    removals, no degraded reason, and nothing that only newer versions know. Its names are not checked: they are sound
    if a batch with the same ones was accepted. Of other records, only the names have columns, if they can be read.
    """

    data: bytes
    rows: I64Matrix
    """[n, NUM_FIELDS] the records, as in `kv_events.kernels.log_records`; positions are relative to `data`."""
    arrays: batches.BatchArrays
    """The batches, as in `kv_events.kernels.batches`."""

    def names(self) -> list[bytes | None]:
        """Return the encoded model, tenant, worker, rank and block size of each batch. None if they are unreadable.

        Batches with equal bytes belong to one stream and have one block size.
        """
        data = self.data
        places = self.arrays.batches[:, (batches.NAMES, batches.NAMES_END)].tolist()
        return [data[start:end] if end else None for start, end in places]


def decode_chunk(chunk: RecordChunk, start: int, stop: int) -> BatchColumns:
    """Decode the records [start, stop) of a chunk."""
    rows = chunk.rows[start:stop]
    arrays = batches.BatchArrays(
        np.empty(len(rows), np.uint8),
        np.empty((len(rows), batches.NUM_BATCH_FIELDS), np.int64),
        np.empty((len(chunk.data) // batches.LEAST_EVENT_BYTES + 1, batches.NUM_EVENT_FIELDS), np.int64),
        np.empty(len(chunk.data) // 8 + 1, np.uint64),
    )
    num_events, num_words = batches.decode_batches(np.frombuffer(chunk.data, np.uint8), rows, arrays)
    used = arrays._replace(events=arrays.events[:num_events], words=arrays.words[:num_words])
    return BatchColumns(chunk.data, rows, used)
