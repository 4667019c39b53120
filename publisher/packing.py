"""Page changes -> wire events: neighbours of one kind become one event, chains of pages share one parent."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kv_events.codec import encode_event
from kv_events.limits import MAX_EVENTS_PER_BATCH
from kv_events.schema import MEDIA, AllBlocksCleared, PackedRemoved, PackedStored
from publisher.change_kernels import CLEARED, REMOVAL, batch_length, rank_changes, sort_changes
from publisher.hand_over import PageChanges

EVENT_BYTES = 80
"""Bound on the bytes of a wire event besides its pages, chains and tokens."""

PAGE_BYTES = 17
"""Bound on the bytes of a page besides its chain's parent: two hashes and a bit."""

_MAX_EVENTS = MAX_EVENTS_PER_BATCH - 2  # room for the marks of a snapshot


class PageTokens(NamedTuple):
    """Tokens of one stored page, for streams that carry them."""

    token_ids: bytes
    """u32, little-endian."""
    extra_key: str | None


class BatchLimits(NamedTuple):
    """What one batch may hold."""

    pages: int
    bytes: int

    def fitting(self, changes: PageChanges, token_bytes: int = 0) -> int:
        """How many of the changes fit one batch; at least one. token_bytes: bound on what tokens cost a page."""
        kinds, hashes, _, parents = changes
        return int(batch_length(kinds, hashes, parents, _MAX_EVENTS, self.bytes, EVENT_BYTES, PAGE_BYTES + token_bytes))


def pack(changes: PageChanges, tokens: list[PageTokens] | None = None) -> list[bytes]:
    """Encoded wire events that lead where the changes lead. tokens: one entry for every store, in order, or None."""
    if tokens is None:
        changes = _in_few_runs(changes)
    events = []
    num_stored = 0
    for start, stop in _runs(changes, tokens):
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


def _in_few_runs(changes: PageChanges) -> PageChanges:
    """The changes in another order of the same meaning. A full cache stores and removes in turn, and an event costs
    its reader as much as hundreds of pages.
    """
    kinds, num_changes = changes.kinds, len(changes.kinds)
    if np.count_nonzero(kinds[1:] != kinds[:-1]) < 2:
        return changes
    ranks, size = np.empty(num_changes, np.int64), 1 << (2 * num_changes - 1).bit_length()
    num_ranks = rank_changes(kinds, changes.hashes, ranks, np.empty(size, np.uint64), np.zeros(size, np.int64))
    words = np.empty((3, num_changes), np.uint64)
    ordered = PageChanges(np.empty(num_changes, np.uint8), *words)
    sort_changes(ranks, np.zeros(num_ranks, np.int64), *changes, *ordered)
    return ordered


def _runs(changes: PageChanges, tokens: list[PageTokens] | None) -> list[tuple[int, int]]:
    """(start, stop) of every stretch of changes that one wire event can say."""
    kinds = changes.kinds
    begins = np.ones(len(kinds), np.bool_)
    begins[1:] = (kinds[1:] != kinds[:-1]) | (kinds[1:] == CLEARED)
    if tokens:
        stores = np.flatnonzero(kinds < REMOVAL)
        traits = [(token.extra_key, len(token.token_ids)) for token in tokens]
        begins[stores[1:]] |= np.array([ours != before for before, ours in pairwise(traits)], np.bool_)
    return list(pairwise([*np.flatnonzero(begins).tolist(), len(kinds)]))


def _stored(medium: int, pages: PageChanges, tokens: list[PageTokens] | None) -> PackedStored:
    starts = np.ones(len(pages.hashes), np.bool_)
    starts[1:] = pages.parents[1:] != pages.hashes[:-1]
    return PackedStored(
        MEDIA[medium],
        pages.hashes.tobytes(),
        pages.block_hashes.tobytes(),
        np.packbits(starts, bitorder="little").tobytes(),
        pages.parents[starts].tobytes(),
        b"".join(token.token_ids for token in tokens) if tokens else None,
        tokens[0].extra_key if tokens else None,
    )
