"""One record of the log: decode, admit, apply in slices, confirm. No I/O; the same for live use and replay."""

from __future__ import annotations

from collections.abc import Iterator

from indexer.dead_letters import DeadLetters
from indexer.errors import IndexFullError
from indexer.namespaces import Namespaces
from kv_events.codec import decode_batch
from kv_events.errors import RecordRejectedError
from kv_events.records import LogRecord


class Applier:
    """Turns records into views."""

    def __init__(self, namespaces: Namespaces, dead_letters: DeadLetters) -> None:
        self.namespaces = namespaces
        self.dead_letters = dead_letters
        self.records = 0
        """Records seen."""

    def apply(self, record: LogRecord, heard_at: float) -> Iterator[None]:
        """Apply one record, slice by slice; a record that breaks the contract becomes a dead letter.

        heard_at: seconds since 1970, when the record was heard of.
        """
        self.records += 1
        try:
            batch = decode_batch(record.payload)
            view = self.namespaces.view_of(batch)
        except RecordRejectedError as error:
            self.dead_letters.put(record, error)
            return
        except IndexFullError as error:
            self.dead_letters.put(record, RecordRejectedError("index_full", str(error)))
            return
        if view.admit(batch):
            view.heard_at = max(view.heard_at, heard_at)
            yield from view.apply(batch)
            view.confirm(batch)
