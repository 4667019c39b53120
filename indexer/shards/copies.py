"""Copies of views from one index to another: out of a shared index for the snapshot of a partition, and back."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator

import numpy as np

from indexer.index import SLICE_PAGES, IndexFullError, StreamPages
from indexer.namespaces import Namespaces
from indexer.views import View
from kv_events.codec import StoredPages
from kv_events.schema import NUM_MEDIA

logger = logging.getLogger(__name__)

_NO_HASHES = np.zeros(0, np.uint64)


def copy_views(views: Iterable[View], target: Namespaces, partition: int) -> Iterator[None]:
    """Copy views with their pages, in slices. Streams that the target knows already are left out.

    views: they must not change before the end. Views that do not fit are left out: their publishers send
    everything again. partition: that of the copies.
    """
    for view in views:
        if target.view(view.stream) is None:
            try:
                copy = yield from _copy(view, target)
                copy.partition = partition
            except IndexFullError as error:
                logger.warning("%s is not copied: %s", view.stream.key, error)


def _copy(view: View, target: Namespaces) -> Generator[None, None, View]:
    yield from target.make_room(view.stream, view.block_size)
    copy = target.add_view(view.stream, view.block_size)
    for held in view.index.stream_pages(view.number):
        for event in _events(held):
            for start in range(0, len(event.hashes), SLICE_PAGES):
                stop = min(start + SLICE_PAGES, len(event.hashes))
                _, refused = copy.index.store(copy.number, event, start, stop)
                copy.count_refused(refused)
                yield
    copy.position, copy.counters = view.position, view.counters
    copy.state, copy.stale_reason, copy.degraded_reason = view.state, view.stale_reason, view.degraded_reason
    copy.last_batch_at, copy.last_batch_tick = view.last_batch_at, view.last_batch_tick
    copy.agreed_at, copy.silent_from = view.agreed_at, view.silent_from
    return copy


def _events(held: StreamPages) -> Iterator[StoredPages]:
    """Yield one store for each tier that holds some of the pages. Each page names its own parent."""
    for medium in range(NUM_MEDIA):
        is_held = (held.tiers >> np.uint8(medium) & np.uint8(1)).astype(np.bool_)
        if is_held.any():
            hashes = held.hashes[is_held]
            chain_starts = np.full(-(-len(hashes) // 8), 0xFF, np.uint8)
            yield StoredPages(medium, hashes, _NO_HASHES, chain_starts, held.parents[is_held])
