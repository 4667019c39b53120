"""Reusable prefixes: the part of the matched pages from which an engine can continue.

Full KV can be reused at every page, a recurrent state only after the page at whose end it was taken, and a sliding
window only if it is complete. Workers publish their states and windows in group streams (see `kv_events.streams`), each
of which has its own index.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from indexer.freshness import Freshness
from indexer.index import Matches
from indexer.namespaces import Namespace
from indexer.views import View, ViewState
from kv_events.hashing import U64Array
from kv_events.streams import group_window

NO_GROUPS = -1
_NO_STREAM = -1


def reusable_pages(
    namespace: Namespace, hashes: U64Array, matches: Matches, freshness: Freshness
) -> npt.NDArray[np.int64]:
    """Return int64[streams]: the pages that each stream of `matches` can reuse, on any tier. -1: it has no groups.

    An expired group stream counts as empty. hashes: uint64[n], C order. matches: the result of the main namespace.
    """
    ranks = [_rank(namespace.views[stream]) for stream in matches.streams.tolist()]
    lengths = matches.pages[matches.streams, -1].astype(np.int64)
    hashes = hashes[: lengths.max(initial=0)]
    has_groups = np.zeros(len(ranks), np.bool_)
    steps = []
    for name, group in namespace.groups.items():
        views = [group.by_rank.get(rank) for rank in ranks]
        lengths[[view is not None and freshness.state(view) is ViewState.EXPIRED for view in views]] = 0
        streams = np.array([_NO_STREAM if view is None else view.number for view in views], np.int64)
        has_groups |= streams != _NO_STREAM
        window = -(-group_window(name) // namespace.key.block_size)
        steps.append(partial(group.index.trim_to_reusable, group.index.holders(hashes), streams, window))
    while any(step(lengths) for step in steps):
        pass  # all groups must allow a prefix to end at the same page
    reusable = np.full(len(matches.pages), NO_GROUPS, np.int64)
    reusable[matches.streams] = np.where(has_groups, lengths, NO_GROUPS)
    return reusable


def _rank(view: View) -> tuple[str, int]:
    return view.stream.worker, view.stream.dp_rank
