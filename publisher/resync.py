"""Builds the stores of a resync: all pages that the worker holds, parents before children."""

from __future__ import annotations

import numpy as np

from kv_events.kernels.prefix_order import prefix_order
from kv_events.schema import NUM_MEDIA
from publisher.change_queue import PageChanges
from publisher.ledger import LedgerCopy


def resync_changes(held: LedgerCopy) -> PageChanges:
    """Return stores of all pages held, ordered by medium, with parents before children.

    The order of the walk down the prefixes keeps the number of chains small.
    """
    live = np.flatnonzero(held.media)
    order = live[prefix_order(held.hashes[live], held.parents[live])]
    media = held.media[order]
    on_medium = [order[media >> medium & 1 == 1] for medium in range(NUM_MEDIA)]
    kinds = np.repeat(np.arange(NUM_MEDIA, dtype=np.uint8), [len(entries) for entries in on_medium])
    rows = np.concatenate(on_medium)
    spans = np.zeros(len(rows), np.uint32)
    return PageChanges(kinds, held.hashes[rows], held.block_hashes[rows], held.parents[rows], spans)
