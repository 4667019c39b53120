"""Reads what a source holds now, from its beginning."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from indexer.sources.base import Source, SourceUnavailableError
from kv_events.records import LogRecord

_PATIENCE_S = 10.0
"""Time without a record after which a source that has more is given up."""


def source_records(source: Source, on_start: Callable[[int], None] = lambda _: None) -> Iterator[LogRecord]:
    """Yield the records of a source, from the oldest one up to the end of each partition as it is at the start.

    on_start: receives the number of these records. Not for use inside an event loop. Raises SourceUnavailableError,
    also if the source does not exist, and LogReplacedError.
    """
    with asyncio.Runner() as runner:
        try:
            positions = dict(runner.run(source.start({})))
            if not positions:
                raise SourceUnavailableError("the topic does not exist; `kvsight doctor` shows what does")
            known = runner.run(source.ends())
            ends = {partition: known[partition] for partition in positions if partition in known}
            on_start(sum(end - positions[partition] for partition, end in ends.items()))
            while any(positions[partition] < end for partition, end in ends.items()):
                for record in runner.run(_next_records(source)):
                    positions[record.partition] = record.offset + 1
                    if record.offset < ends.get(record.partition, 0):
                        yield record
        finally:
            runner.run(source.stop())


async def _next_records(source: Source) -> Sequence[LogRecord]:
    """Return at least one record. A source that is away is noticed by asking it for its ends."""
    give_up = time.monotonic() + _PATIENCE_S
    while not (records := await source.fetch()):
        await source.ends()
        if time.monotonic() > give_up:
            raise SourceUnavailableError(f"no record within {_PATIENCE_S:.0f} s, although the log has more")
    return records
