"""Runs: an engine's events as the bridge's own, columns ready for kernels.

A run is one event, or neighbours that can be taken together. An event that makes no sense is a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bridge.decoding.envelopes import Envelope
from kv_events.hashing import U32Array, U64Array

_MASK64 = 2**64 - 1


class PageEvents(NamedTuple):
    """Stored pages by the engine's names, and removed ones: one or more events."""

    block_hashes: npt.NDArray[np.uint64]
    """[n] all events' pages in a row."""
    lengths: npt.NDArray[np.int64]
    """[m] pages of each event."""
    parents: npt.NDArray[np.uint64]
    """[m] block hash before each stored event's first page."""
    has_parent: npt.NDArray[np.uint8]
    """[m] 1 where `parents` is meant; else the first page is a prompt's first."""
    is_removal: npt.NDArray[np.uint8]
    """[m] 1 where pages are removed; they are passed on as they are."""

    def part(self, start: int, stop: int, first_page: int, end_page: int) -> PageEvents:
        """Events start .. stop, which have the pages first_page .. end_page."""
        here = slice(start, stop)
        return PageEvents(
            self.block_hashes[first_page:end_page],
            self.lengths[here],
            self.parents[here],
            self.has_parent[here],
            self.is_removal[here],
        )

    @classmethod
    def stored(cls, block_hashes: npt.NDArray[np.uint64], parent: int | None) -> PageEvents:
        """One event. parent: a block hash."""
        return cls(
            block_hashes,
            np.array([len(block_hashes)], np.int64),
            np.array([parent or 0], np.uint64),
            np.array([parent is not None], np.uint8),
            np.zeros(1, np.uint8),
        )


class Place(NamedTuple):
    """Where pages lie, in the engine's words."""

    medium: str
    locality: str = ""


class StoredRun(NamedTuple):
    """Stored pages."""

    events: PageEvents
    tokens: U32Array
    """All events' tokens in a row; empty: not said. Pairs came as n + 1 tokens, and only in runs of one event."""
    num_positions: int
    """Tokens, or pairs."""
    is_bigram: bool
    block_size: int
    """0: not said."""
    place: Place
    group: int | None
    spec_kind: str
    lora_name: str
    """An adapter's name, or its number where only that is said; empty: the base model."""
    cache_salt: str
    extra_keys: list[Any]
    """vLLM's, where one of the pages has any; only in runs of one event."""

    @classmethod
    def of_envelope(cls, event: Envelope, token_ids: list[int], block_size: int) -> StoredRun:
        """block_size: where the event names none."""
        parent = event.parent_hash
        return cls(
            PageEvents.stored(hashes_of(event), None if parent is None else parent & _MASK64),
            np.array(token_ids, np.uint32),
            len(token_ids),
            is_bigram=False,
            block_size=event.block_size or block_size,
            place=Place(event.medium or ""),
            group=None,
            spec_kind="",
            lora_name=event.lora_name or "",
            cache_salt=event.additional_salt or "",
            extra_keys=[],
        )


class RemovedRun(NamedTuple):
    """Removed pages."""

    block_hashes: U64Array
    place: Place
    group: int | None


class MixedRun(NamedTuple):
    """Pages stored and removed in turn, or on several media. Stored pages are whole, with their tokens."""

    stored: StoredRun
    """What all stores say, save for the medium; its events are all of the run, the removals among them."""
    places: npt.NDArray[np.uint8]
    """[m] number of each event's medium."""
    media: list[Place]

    def parts(self) -> Iterator[StoredRun | RemovedRun]:
        """The same, in runs of one kind and one medium."""
        stored, events = self.stored, self.stored.events
        pages = np.cumsum([0, *events.lengths])
        stored_pages = np.cumsum([0, *np.where(events.is_removal, 0, events.lengths)])
        kinds = events.is_removal.astype(np.int64) << 8 | self.places
        borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
        for start, stop in pairwise(borders):
            place = self.media[self.places[start]]
            if events.is_removal[start]:
                yield RemovedRun(events.block_hashes[pages[start] : pages[stop]], place, stored.group)
            else:
                size = stored.block_size
                tokens = stored.tokens[stored_pages[start] * size : stored_pages[stop] * size]
                part = events.part(start, stop, pages[start], pages[stop])
                yield stored._replace(events=part, tokens=tokens, num_positions=len(tokens), place=place)


class ClearedRun(NamedTuple):
    """Nothing is held any more."""


class BadEvent(NamedTuple):
    """An event that cannot be read."""

    reason: str
    """One of a small fixed set of words."""
    may_remove: bool = True
    """Whether it may have said that pages are gone."""


def hashes_of(event: Envelope) -> U64Array:
    """uint64: the hashes that an envelope names."""
    return np.array([value & _MASK64 for value in event.seq_hashes], np.uint64)


Run: TypeAlias = StoredRun | RemovedRun | MixedRun | ClearedRun | Envelope | BadEvent
