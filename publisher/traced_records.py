"""Spans of records on their way to the sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from publisher.sinks.base import OutRecord

if TYPE_CHECKING:
    from kv_events.runtime.spans import Spans


@contextmanager
def traced_records(
    spans: Spans, records: Sequence[OutRecord], epoch: int, first_seq: int
) -> Iterator[Sequence[OutRecord]]:
    """Run a block that sends records, and yield them with the contexts of their spans. Spans end with the block.

    first_seq: sequence number of the first record.
    """
    started = [
        spans.start("publish", "producer", _attributes(record, epoch, seq))
        for seq, record in enumerate(records, first_seq)
    ]
    try:
        yield [record._replace(headers=spans.headers(span)) for record, span in zip(records, started, strict=True)]
    except Exception as error:
        for span in started:
            spans.fail(span, repr(error))
        raise
    finally:
        for span in started:
            span.end()


def _attributes(record: OutRecord, epoch: int, seq: int) -> dict[str, str | int]:
    return {
        "kvsight.stream": record.key.decode(),
        "kvsight.epoch": epoch,
        "kvsight.seq": seq,
        "kvsight.pages": record.num_pages,
        "messaging.message.body.size": len(record.payload),
    }
