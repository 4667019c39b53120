"""Listens to the topic of events while a prompt is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kv_events.records import LogRecord

if TYPE_CHECKING:
    from indexer.settings import IndexerSettings


class Arrival(NamedTuple):
    """A batch that was added to the topic while this command was listening."""

    model: str
    tenant: str
    worker: str
    pages_stored: int
    degraded_reason: str
    ahead_s: float
    """How far the publisher's clock is ahead of this machine's; less by the time that the batch took."""


async def listen(
    settings: IndexerSettings, send: Callable[[], None], is_awaited: Callable[[Arrival], bool], wait_s: float
) -> list[Arrival]:
    """Return what is added to the topic, from before `send` is called until the first awaited batch arrives.

    wait_s: longest wait after `send`. Raises KvsightError, and what `send` raises.
    """
    from api.background import run_in_daemon_thread
    from indexer.sources.kafka import KafkaSource

    source, arrivals = KafkaSource(settings), list[Arrival]()
    try:
        await source.start({})
        ends = await source.ends()
        await source.stop()
        await source.start(ends)
        await run_in_daemon_thread(send)  # Ctrl-C does not wait for the engine
        give_up = time.monotonic() + wait_s
        while time.monotonic() < give_up and not any(map(is_awaited, arrivals)):
            arrivals += _decoded(await source.fetch())
    finally:
        await source.stop()
    return arrivals


def _decoded(records: Sequence[LogRecord]) -> list[Arrival]:
    """Decode records. Those that cannot be decoded are left out."""
    from kv_events.codec import decode_batch
    from kv_events.errors import RecordRejectedError

    now, found = time.time(), []
    for record in records:
        try:
            batch = decode_batch(record.payload)
        except RecordRejectedError:
            continue
        who, ahead_s = batch.stream, batch.timestamp - now
        found.append(
            Arrival(who.model, who.tenant, who.worker, batch.pages().stored.total(), batch.degraded_reason, ahead_s)
        )
    return found
