"""Runs: decoded events in columns, ready for kernels.

A run is one event, or several adjacent ones that can be applied together.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bridge.decoding.mooncake import MooncakeEvent
from kv_events.hashing import U32Array, U64Array
from kv_events.kernels.bundles import I64Vector, U8Vector, U64Input, U64Vector

_MASK64 = 2**64 - 1


class PageEvents(NamedTuple):
    """Pages stored and removed by one or more events, as engine hashes."""

    block_hashes: U64Input
    """[n] pages of all events, one after the other."""
    lengths: I64Vector
    """[m] pages of each event."""
    parents: U64Vector
    """[m] block hash before each stored event's first page."""
    has_parent: U8Vector
    """[m] whether `parents` applies. If not, the event's first page begins a prompt."""
    is_removal: U8Vector
    """[m] whether the event removes its pages."""

    def part(self, start: int, stop: int, first_page: int, end_page: int) -> PageEvents:
        """Events start:stop, whose pages are first_page:end_page."""
        here = slice(start, stop)
        return PageEvents(
            self.block_hashes[first_page:end_page],
            self.lengths[here],
            self.parents[here],
            self.has_parent[here],
            self.is_removal[here],
        )

    def copy(self) -> PageEvents:
        """A copy with memory of its own."""
        block_hashes, lengths, parents, has_parent, is_removal = self
        return PageEvents(block_hashes.copy(), lengths.copy(), parents.copy(), has_parent.copy(), is_removal.copy())

    @classmethod
    def stored(cls, block_hashes: U64Vector, parent: int | None) -> PageEvents:
        """A store event. parent: block hash of the page before the first."""
        return cls(
            block_hashes,
            np.array([len(block_hashes)], np.int64),
            np.array([parent or 0], np.uint64),
            np.array([parent is not None], np.uint8),
            np.zeros(1, np.uint8),
        )


class Location(NamedTuple):
    """Where pages are, as the engine names it."""

    medium: str
    locality: str = ""


class AttentionSpec(NamedTuple):
    """What a store says of its attention group, in vLLM's words."""

    kind: str = ""
    """Empty if the store does not say: full attention."""
    window: int = 0
    """Tokens of a sliding window. 0: none."""


class StoredRun(NamedTuple):
    """Stored pages."""

    events: PageEvents
    tokens: U32Array
    """Tokens of all events, one after the other; may be absent. n overlapping pairs are n + 1 tokens, in one event."""
    num_positions: int
    """Number of tokens, or of pairs."""
    is_bigram: bool
    block_size: int
    """0 if the events do not say."""
    location: Location
    attention_group: int | None
    spec: AttentionSpec
    lora_name: str
    """Adapter's name, or its number if that is all the events say; empty for the base model."""
    cache_salt: str
    extra_keys: list[Any]
    """vLLM's `extra_keys` if one of the pages has any. Only in runs of one event."""

    def copy(self) -> StoredRun:
        """A copy that stays valid when the decoder goes on."""
        return self._replace(events=self.events.copy(), tokens=self.tokens.copy())

    @classmethod
    def of_mooncake_event(cls, event: MooncakeEvent, token_ids: list[int], block_size: int) -> StoredRun:
        """Make a run of one event. block_size: used if the event names none."""
        parent = event.parent_hash
        return cls(
            PageEvents.stored(hashes_of(event), None if parent is None else parent & _MASK64),
            np.array(token_ids, np.uint32),
            len(token_ids),
            is_bigram=False,
            block_size=event.block_size or block_size,
            location=Location(event.medium or ""),
            attention_group=None,
            spec=AttentionSpec(),
            lora_name=event.lora_name or "",
            cache_salt=event.additional_salt or "",
            extra_keys=[],
        )


class RemovedRun(NamedTuple):
    """Removed pages."""

    block_hashes: U64Array
    location: Location
    attention_group: int | None

    def copy(self) -> RemovedRun:
        """See `StoredRun.copy`."""
        return self._replace(block_hashes=self.block_hashes.copy())


class MixedRun(NamedTuple):
    """Stores and removals mixed, or on several media. Stored pages are whole and have tokens."""

    stored: StoredRun
    """The properties that all stores share; the location varies. Its `events` include the removals."""
    location_indices: U8Vector
    """[m] index of each event's location in `locations`."""
    locations: list[Location]

    def copy(self) -> MixedRun:
        """See `StoredRun.copy`."""
        return self._replace(stored=self.stored.copy(), location_indices=self.location_indices.copy())

    def parts(self) -> Iterator[StoredRun | RemovedRun]:
        """Split into runs of one kind and one location."""
        stored, events = self.stored, self.stored.events
        pages = np.cumsum([0, *events.lengths])
        stored_pages = np.cumsum([0, *np.where(events.is_removal, 0, events.lengths)])
        kinds = events.is_removal.astype(np.int64) << 8 | self.location_indices
        borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
        for start, stop in pairwise(borders):
            location = self.locations[self.location_indices[start]]
            if events.is_removal[start]:
                yield RemovedRun(events.block_hashes[pages[start] : pages[stop]], location, stored.attention_group)
            else:
                size = stored.block_size
                tokens = stored.tokens[stored_pages[start] * size : stored_pages[stop] * size]
                part = events.part(start, stop, pages[start], pages[stop])
                yield stored._replace(events=part, tokens=tokens, num_positions=len(tokens), location=location)


class ClearedRun(NamedTuple):
    """The worker holds no pages."""

    num_events: int = 1


class InvalidEvent(NamedTuple):
    """An invalid event, or several adjacent ones that are invalid for the same reason."""

    reason: str
    """One of a fixed set of words; a metric has them as a label."""
    may_remove: bool = True
    """Whether it may have removed pages."""
    num_events: int = 1


def hashes_of(event: MooncakeEvent) -> U64Array:
    """uint64[n]: the hashes of an event."""
    return np.array([value & _MASK64 for value in event.seq_hashes], np.uint64)


Run: TypeAlias = StoredRun | RemovedRun | MixedRun | ClearedRun | MooncakeEvent | InvalidEvent
