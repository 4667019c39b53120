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
from indexer.namespaces import GroupStreams, Namespace
from indexer.view_columns import FAULT_CLOSED, ViewColumns
from indexer.views import View
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
    lengths = matches.pages[matches.streams, -1].astype(np.int64)
    hashes = hashes[: lengths.max(initial=0)]
    has_groups = np.zeros(len(lengths), np.bool_)
    steps = []
    for name, group in namespace.groups.items():
        streams = _streams_in(namespace, name, group)[matches.streams]
        lengths[(streams != _NO_STREAM) & _are_expired(group.columns, streams, freshness)] = 0
        has_groups |= streams != _NO_STREAM
        window = -(-group_window(name) // namespace.key.block_size)
        steps.append(partial(group.index.trim_to_reusable, group.index.holders(hashes), streams, window))
    while any(step(lengths) for step in steps):
        pass  # all groups must allow a prefix to end at the same page
    reusable = np.full(len(matches.pages), NO_GROUPS, np.int64)
    reusable[matches.streams] = np.where(has_groups, lengths, NO_GROUPS)
    return reusable


def _are_expired(columns: ViewColumns, streams: npt.NDArray[np.int64], freshness: Freshness) -> npt.NDArray[np.bool_]:
    """Return bool[streams], as `Freshness.state` decides. Stream -1 gives any value."""
    is_silent = columns.heard_tick[streams] < freshness.expired_before()
    expired: npt.NDArray[np.bool_] = is_silent | (columns.faults[streams] == FAULT_CLOSED)
    return expired


def _streams_in(namespace: Namespace, name: str, group: Namespace) -> npt.NDArray[np.int64]:
    """Return int64[streams]: the number that each stream of the namespace has in its group, -1 if it has none."""
    changes = (namespace.num_changes, group.num_changes)
    kept = namespace.group_streams.get(name)
    if kept is None or kept.changes != changes or kept.group is not group:
        streams = np.full(len(namespace.columns.states), _NO_STREAM, np.int64)
        for number, view in namespace.views.items():
            found = group.by_rank.get(_rank(view))
            streams[number] = _NO_STREAM if found is None else found.number
        kept = namespace.group_streams[name] = GroupStreams(group, changes, streams)
    return kept.streams


def _rank(view: View) -> tuple[str, int]:
    return view.stream.worker, view.stream.dp_rank
