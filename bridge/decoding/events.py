"""Runs: decoded events in columns, ready for kernels.

A run is one event, or several adjacent ones that can be applied together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bridge.decoding.kernels.columns import REMOVAL
from bridge.decoding.mooncake import MooncakeEvent
from kv_events.hashing import U32Array, U64Array
from kv_events.kernels.bundles import I64Vector, U8Vector, U64Input, U64Vector
from kv_events.schema import MEDIUM_INDEX, StorageMedium

MASK64 = 2**64 - 1
_NO_TOKENS = np.empty(0, np.uint32)


UNKNOWN = 128
"""Added to the kinds of events on unknown media. The ledger skips them."""
_GPU, _CPU, _DISK, _EXTERNAL = (MEDIUM_INDEX[medium.value] for medium in StorageMedium)
_TIERS = {
    "": _GPU,  # absent
    "GPU": _GPU,
    "CPU": _CPU,  # vLLM's offload, LMCache, Mooncake
    "CPU_PINNED": _CPU,  # SGLang
    "CPU_TIER1": _CPU,  # Dynamo's block manager; also the next two
    "CPU_TIER2": _DISK,
    "NVME": _DISK,
    "DISK": _DISK,
    "FS": _DISK,  # vLLM's offload; also the next two
    "OBJ": _DISK,
    "STORAGE": _DISK,
    "EXTERNAL": _EXTERNAL,  # SGLang's third level
    "REMOTE": _EXTERNAL,  # ATOM
}
_CUDA_DEVICE = "DEVICE(TYPE='CUDA'"  # one LMCache version writes this for GPU


class Medium(NamedTuple):
    """Where pages are."""

    tier: int | None
    """Index of the tier. None if the medium is unknown."""
    name: str = ""
    """The engine's name of an unknown medium."""

    @property
    def is_device(self) -> bool:
        """Whether it is the accelerator's own memory."""
        return self.tier == _GPU


def medium_of(name: str, locality: str = "") -> Medium:
    """The medium of this name, in any case.

    locality: vLLM's `LOCAL` or `REMOTE`. Pages on another machine are external, whatever their medium there.
    """
    upper = name.upper()
    tier = _GPU if upper.startswith(_CUDA_DEVICE) else _TIERS.get(upper)
    if tier is None:
        return Medium(None, name)
    return Medium(_EXTERNAL if locality.upper() == "REMOTE" else tier)


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
    kinds: U8Vector
    """[m] tier, plus REMOVAL for a removal; UNKNOWN and the medium's index in its run if the medium is unknown."""

    def part(self, start: int, stop: int, first_page: int, end_page: int) -> PageEvents:
        """Events start:stop, whose pages are first_page:end_page."""
        here = slice(start, stop)
        pages = self.block_hashes[first_page:end_page]
        return PageEvents(pages, self.lengths[here], self.parents[here], self.has_parent[here], self.kinds[here])

    def copy(self) -> PageEvents:
        """A copy with memory of its own."""
        return PageEvents._make(column.copy() for column in self)

    @classmethod
    def one(cls, block_hashes: U64Vector, parent: int | None = None) -> PageEvents:
        """One event. parent: block hash of the page before the first."""
        return cls(
            block_hashes,
            np.array([len(block_hashes)], np.int64),
            np.array([parent or 0], np.uint64),
            np.array([parent is not None], np.uint8),
            np.zeros(1, np.uint8),
        )


class AttentionSpec(NamedTuple):
    """What a store says of its attention group, in vLLM's words."""

    kind: str = ""
    """Empty if the store does not say: full attention."""
    window: int = 0
    """Tokens of a sliding window. 0: none."""


class PageRun(NamedTuple):
    """Pages stored and removed by events of one attention group. The stores differ in their pages and media only."""

    events: PageEvents
    """`kinds` are only those of the ledger if the run is mixed."""
    medium: Medium
    """That of the first store, or of all removals."""
    attention_group: int | None = None
    is_removal: bool = False
    """Whether it only removes pages."""
    media: Sequence[Medium] = ()
    """Not empty if the run is mixed: of stores and removals, or of several media. Its stores are whole and have tokens.
    """
    tokens: U32Array = _NO_TOKENS
    """Tokens of all events, one after the other; may be absent. n overlapping pairs are n + 1 tokens, in one event."""
    num_positions: int = 0
    """Number of tokens, or of pairs."""
    is_bigram: bool = False
    block_size: int = 0
    """0 if the events do not say."""
    spec: AttentionSpec = AttentionSpec()
    lora_name: str = ""
    """Adapter's name, or its number if that is all the events say; empty for the base model."""
    cache_salt: str = ""
    extra_keys: Sequence[Any] = ()
    """vLLM's `extra_keys` if one of the pages has any. Only in runs of one event."""

    def copy(self) -> PageRun:
        """A copy that stays valid when the decoder goes on."""
        return self._replace(events=self.events.copy(), tokens=self.tokens.copy())

    def parts(self) -> Iterator[PageRun]:
        """Split into runs of stores on one medium, and of removals from one."""
        if not self.media:
            yield self
            return
        events = self.events
        is_removal = events.kinds & REMOVAL > 0
        pages = np.cumsum([0, *events.lengths])
        stored_pages = np.cumsum([0, *np.where(is_removal, 0, events.lengths)])
        borders = [0, *(np.flatnonzero(np.diff(events.kinds)) + 1).tolist(), len(events.kinds)]
        for start, stop in pairwise(borders):
            part = events.part(start, stop, pages[start], pages[stop])
            medium = self.medium_at(start)
            if is_removal[start]:
                yield PageRun(part, medium, self.attention_group, is_removal=True)
            else:
                tokens = self.tokens[stored_pages[start] * self.block_size : stored_pages[stop] * self.block_size]
                yield self._replace(events=part, medium=medium, media=(), tokens=tokens, num_positions=len(tokens))

    def medium_at(self, event: int) -> Medium:
        """The medium of an event of a mixed run."""
        kind = int(self.events.kinds[event])
        return self.media[kind % REMOVAL] if kind >= UNKNOWN else Medium(kind % REMOVAL)


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
    return np.array([value & MASK64 for value in event.seq_hashes], np.uint64)


Run: TypeAlias = PageRun | ClearedRun | MooncakeEvent | InvalidEvent
