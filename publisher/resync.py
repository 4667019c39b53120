"""Builds the stores of a resync: all pages that the worker holds, parents before children."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_events.schema import NUM_MEDIA
from publisher.change_kernels import order_by_prefix
from publisher.change_queue import PageChanges
from publisher.ledger import LedgerCopy


def resync_changes(held: LedgerCopy) -> PageChanges:
    """Return stores of all pages held, ordered by medium, with parents before children.

    The order of the walk down the prefixes keeps the number of chains small.
    """
    parents = _parent_entries(held)
    order = np.empty(len(held.media), np.int64)
    order = order[: order_by_prefix(held.media, parents, order)]
    media = held.media[order]
    on_medium = [order[media >> medium & 1 == 1] for medium in range(NUM_MEDIA)]
    kinds = np.repeat(np.arange(NUM_MEDIA, dtype=np.uint8), [len(entries) for entries in on_medium])
    rows = np.concatenate(on_medium)
    spans = np.zeros(len(rows), np.uint32)
    return PageChanges(kinds, held.hashes[rows], held.block_hashes[rows], held.parents[rows], spans)


def _parent_entries(held: LedgerCopy) -> npt.NDArray[np.int64]:
    """Return int64[n], the entry of each page's parent, or -1 if the parent is not held."""
    live = np.flatnonzero(held.media)
    live = live[np.argsort(held.hashes[live])]
    entries = np.full(len(held.media), -1, np.int64)
    if len(live):
        names = held.hashes[live]
        places = np.minimum(np.searchsorted(names, held.parents), len(live) - 1)
        found = (names[places] == held.parents) & (held.parents != 0)
        entries[found] = live[places[found]]
    return entries
