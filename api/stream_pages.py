"""Reads the pages of a worker stream in slices. The views may change between two slices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt

from indexer.consumer import Consumer
from indexer.index import StreamPages
from indexer.views import View
from kv_events.hashing import U64Array

_LONGEST_CHAIN_BITS = 32


async def stream_pages(consumer: Consumer, view: View) -> AsyncIterator[StreamPages]:
    """Yield the pages of a stream in slices. Other tasks run after each slice. Ends if the stream is forgotten."""
    if not is_known(consumer, view):
        return
    for held in view.index.stream_pages(view.number):
        yield held
        await asyncio.sleep(0)
        if not is_known(consumer, view):
            return


def is_known(consumer: Consumer, view: View) -> bool:
    """Return whether a view is still in use. It may have been forgotten while other tasks were running."""
    return consumer.namespaces.view(view.stream) is view


def parents_first(hashes: U64Array, parents: U64Array) -> npt.NDArray[np.intp]:
    """Return an order of pages in which each parent precedes its children. Parents not in `hashes` are ignored.

    hashes: uint64[n], distinct. parents: uint64[n], 0 for none. Returns intp[n], indices. Cycles of parents, which only
    a faulty publisher sends, are returned in any order.
    """
    by_hash = np.argsort(hashes)
    places = np.minimum(np.searchsorted(hashes, parents, sorter=by_hash), max(0, len(hashes) - 1))
    ancestor = by_hash[places]
    ancestor[hashes[ancestor] != parents] = -1
    # depth by doubling: after round k, `depth` counts up to 2**k ancestors, and `ancestor` is the one beyond them
    depth = (ancestor >= 0).astype(np.int64)
    for _ in range(_LONGEST_CHAIN_BITS):
        open_ends = np.flatnonzero(ancestor >= 0)
        if not len(open_ends):
            break
        beyond = ancestor[open_ends]
        depth[open_ends] += depth[beyond]
        ancestor[open_ends] = ancestor[beyond]
    return np.argsort(depth, kind="stable")
