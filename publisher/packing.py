"""Packs page changes into wire events. Adjacent changes of one kind become one event; a chain has one parent."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kv_events.codec import encode_event
from kv_events.limits import MAX_EVENTS_PER_BATCH
from kv_events.schema import MEDIA, AllBlocksCleared, PackedRemoved, PackedStored
from publisher.kernels.changes import (
    CLEARED,
    NUM_RANKS,
    REMOVAL,
    PageChanges,
    batch_length,
    mark_chains,
    sort_changes,
)

EVENT_BYTES = 80
"""Upper bound on the bytes of a wire event without its pages, chains and tokens."""

PAGE_BYTES = 17
"""Upper bound on the bytes of a page without its chain's parent: two hashes and one bit."""

_MAX_EVENTS = MAX_EVENTS_PER_BATCH - 2  # room for SnapshotBegin and SnapshotEnd


class PageTokens(NamedTuple):
    """Tokens of one stored page, for streams that carry tokens."""

    token_ids: bytes
    """u32, little-endian."""
    extra_key: str | None


def num_fitting(changes: PageChanges, max_bytes: int, token_bytes: int = 0) -> int:
    """Return how many of the changes fit into a batch of `max_bytes`, at least one.

    token_bytes: upper bound on the bytes that tokens add to each page.
    """
    return int(batch_length(changes, _MAX_EVENTS, max_bytes, EVENT_BYTES, PAGE_BYTES + token_bytes))


def pack(changes: PageChanges, tokens: list[PageTokens] | None = None) -> list[bytes]:
    """Return encoded wire events with the same effect as the changes.

    tokens: one entry for each store, in order, or None.
    """
    changes, runs = _sorted(changes) if tokens is None else (changes, _runs(changes, tokens))
    events = []
    num_stored = 0
    for start, stop in runs:
        kind, part = int(changes.kinds[start]), changes.part(start, stop)
        if kind < REMOVAL:
            part_tokens = tokens and tokens[num_stored : num_stored + stop - start]
            num_stored += stop - start
            events.append(encode_event(_stored(kind, part, part_tokens)))
        elif kind < CLEARED:
            names = part.hashes.tobytes(), part.block_hashes.tobytes()
            events.append(encode_event(PackedRemoved(MEDIA[kind - REMOVAL], *names)))
        else:
            events.append(encode_event(AllBlocksCleared()))
    return events


def _sorted(changes: PageChanges) -> tuple[PageChanges, list[tuple[int, int]]]:
    """Return the changes in an equivalent order with fewer runs, and (start, stop) of each run.

    A full cache alternates between stores and removals, and one event costs its reader as much as hundreds of pages.
    The returned changes have no spans, because they are no longer needed.
    """
    num_changes = len(changes.kinds)
    if not num_changes:
        return changes, []
    first = changes.kinds[0]
    if first != CLEARED and (changes.kinds == first).all():
        return changes, [(0, num_changes)]
    num_spans = (int(changes.spans[-1]) - int(changes.spans[0])) % 2**32 + 1
    words, borders = np.empty((3, num_changes), np.uint64), np.empty(num_changes + 1, np.int64)
    ordered = PageChanges(np.empty(num_changes, np.uint8), words[0], words[1], words[2], changes.spans[:0])
    num_runs = sort_changes(changes, np.zeros(NUM_RANKS * num_spans, np.int64), ordered, borders)
    return ordered, list(pairwise(borders[: num_runs + 1].tolist()))


def _runs(changes: PageChanges, tokens: list[PageTokens]) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of changes that fits into one wire event, in order."""
    kinds = changes.kinds
    begins = np.ones(len(kinds), np.bool_)
    begins[1:] = (kinds[1:] != kinds[:-1]) | (kinds[1:] == CLEARED)
    stores = np.flatnonzero(kinds < REMOVAL)
    traits = [(token.extra_key, len(token.token_ids)) for token in tokens]
    begins[stores[1:]] |= np.array([ours != before for before, ours in pairwise(traits)], np.bool_)
    return list(pairwise([*np.flatnonzero(begins).tolist(), len(kinds)]))


def _stored(medium: int, pages: PageChanges, tokens: list[PageTokens] | None) -> PackedStored:
    num_pages = len(pages.hashes)
    starts, firsts = np.zeros(-(-num_pages // 8), np.uint8), np.empty(num_pages, np.uint64)
    num_chains = mark_chains(pages.hashes, pages.parents, starts, firsts)
    return PackedStored(
        MEDIA[medium],
        pages.hashes.tobytes(),
        pages.block_hashes.tobytes(),
        starts.tobytes(),
        firsts[:num_chains].tobytes(),
        b"".join(token.token_ids for token in tokens) if tokens else None,
        tokens[0].extra_key if tokens else None,
    )
