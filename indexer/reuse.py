"""What an engine can really go on from: of the pages matched, as many as its states and windows reach.

Full KV is of use wherever a prompt shares it; a recurrent state only behind the page at whose end it was taken, and a
sliding window only whole. Workers say of both where they are in group streams (see `kv_events.streams`), each of which
is looked up in an index of its own.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from indexer.freshness import Freshness
from indexer.index import Matches
from indexer.namespaces import Namespace
from indexer.views import View, ViewState
from kv_events.hashing import U64Array
from kv_events.streams import group_window

_NO_STREAM = -1


def reusable_pages(
    namespace: Namespace, hashes: U64Array, matches: Matches, freshness: Freshness
) -> dict[tuple[str, int], int]:
    """Pages that each (worker, DP rank) with group streams can reuse, of those that it holds on any tier.

    A group stream that is expired holds nothing. hashes: uint64[n], C order; matches: what the namespace has found.
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
        pass  # where one group lets a prefix end the others must, too
    return {rank: int(lengths[i]) for i, rank in enumerate(ranks) if has_groups[i]}


def _rank(view: View) -> tuple[str, int]:
    return view.stream.worker, view.stream.dp_rank
