"""Kernels on the index of a group: find where a prefix can end for a worker that holds more than KV.

The index of a group holds the *marked* pages of each stream, on any tier. A prefix can end after a page if the last
`window` pages up to and including it are marked, or all pages if there are fewer.
"""

from __future__ import annotations

import numpy as np
from numba import types

from indexer.kernels.apply import look_up
from indexer.kernels.find import PageLookup
from kv_events.bundles import I64Vector, U32Vector, U64Input, U64Matrix
from kv_events.kernels import array_function, array_kernel
from kv_events.schema import NUM_MEDIA

_EMPTY = np.uint64(0)


@array_kernel(types.void, PageLookup, U64Input, U32Vector)
def sets_of_pages(pages, hashes, out_sets):
    """Look up the holder set of each page of a prompt, once for all streams.

    hashes: uint64[n], sequence hashes. out_sets: uint32[n], written; 0, the empty set, for pages without holders. The
    result is valid until the next change of the index.
    """
    entry = np.int64(-1)
    for i in range(hashes.shape[0]):
        entry = look_up(pages, entry, hashes[i])
        out_sets[i] = pages.holders[entry] if entry >= 0 else np.uint32(0)


@array_function
def _is_marked(words, held, stream):
    width = words.shape[1] // NUM_MEDIA
    any_tier = _EMPTY
    for tier in range(NUM_MEDIA):
        any_tier |= words[held, tier * width + (stream >> 6)]
    return (any_tier >> np.uint64(stream & 63)) & np.uint64(1) != _EMPTY


@array_function
def _longest(words, sets, stream, window, length):
    """Return the longest prefix of at most `length` pages whose last window is marked."""
    marked = 0
    for i in range(length - 1, -1, -1):
        if not _is_marked(words, np.int64(sets[i]), stream):
            marked, length = 0, i
            continue
        marked += 1
        if marked == window:
            break
    return length


@array_kernel(types.boolean, U64Matrix, U32Vector, I64Vector, types.int64, I64Vector)
def trim_to_reusable(words, sets, streams, window, lengths):
    """Shorten prefixes until each one ends at a page where it can end. Returns whether any prefix became shorter.

    words: uint64[sets, 4 * width]. sets: uint32[n], holder sets of the prompt's pages. streams: int64[k]; prefixes of
    stream -1 are not changed. window: pages, at least 1. lengths: int64[k], updated: pages of each stream's prefix, at
    most n.
    """
    has_changed = False
    for k in range(streams.shape[0]):
        if streams[k] >= 0:
            shorter = _longest(words, sets, streams[k], window, lengths[k])
            has_changed |= shorter < lengths[k]
            lengths[k] = shorter
    return has_changed
