"""Decoded events in columns, ready for kernels, and media as tiers.

A run is one event, or several adjacent ones that can be applied together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from bridge.decoding.kernels.columns import EXTERNAL, REMOVAL, TIERS, UNKNOWN
from kv_events.hashing import U32Array
from kv_events.schema import UNREADABLE
from publisher.kernels.events import PageEvents

MASK64 = 2**64 - 1
_NO_TOKENS = np.empty(0, np.uint32)
_CUDA_DEVICE = "DEVICE(TYPE='CUDA'"  # one LMCache version writes this for GPU


def tier_of(name: str, locality: str = "") -> int:
    """Return the tier of a medium, in any case, or UNKNOWN.

    locality: vLLM's `LOCAL` or `REMOTE`. Pages on another machine are external, whatever their medium there.
    """
    upper = name.upper()
    tier = TIERS[""] if upper.startswith(_CUDA_DEVICE) else TIERS.get(upper, UNKNOWN)
    return EXTERNAL if tier != UNKNOWN and locality.upper() == "REMOTE" else tier


class AttentionSpec(NamedTuple):
    """What a store says of its attention group, in vLLM's words."""

    kind: str = ""
    """Empty if the store does not say: full attention."""
    window: int = 0
    """Tokens of a sliding window. 0: none."""


class PageRun(NamedTuple):
    """Pages stored and removed by events of one attention group. The stores differ in their pages and tiers only."""

    events: PageEvents
    """With the engine's hashes. Those of the events' pages are not known yet. All events of a run on an unknown medium
    are of that medium."""
    tier: int
    """That of the first store, or of all removals of one tier; UNKNOWN for an unknown medium."""
    attention_group: int | None = None
    medium: str = ""
    """The engine's name of an unknown medium."""
    is_removal: bool = False
    """Whether it only removes pages."""
    is_mixed: bool = False
    """Whether it is of stores and removals, or of several tiers. Its stores are whole and have tokens."""
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

    @property
    def is_on_device(self) -> bool:
        """Whether its tier is the accelerator's own memory."""
        return self.tier == TIERS[""]

    def copy(self) -> PageRun:
        """Return a copy that stays valid when the decoder goes on."""
        events = PageEvents._make(column.copy() for column in self.events)
        return self._replace(events=events, tokens=self.tokens.copy())

    def parts(self) -> Iterator[PageRun]:
        """Split into runs of stores on one tier, and of removals from one."""
        events = self.events
        if (events.kinds == events.kinds[0]).all():
            yield self._replace(is_mixed=False) if self.is_mixed else self
            return
        kinds, borders = events.kinds.tolist(), np.flatnonzero(np.diff(events.kinds)) + 1
        pages = np.cumsum([0, *events.lengths]).tolist()
        stored_pages = np.cumsum([0, *np.where(events.kinds & REMOVAL, 0, events.lengths)]).tolist()
        for start, stop in pairwise([0, *borders.tolist(), len(kinds)]):
            part, kind = events.part(slice(start, stop), slice(pages[start], pages[stop])), kinds[start]
            if kind & REMOVAL:
                yield PageRun(part, kind - REMOVAL, self.attention_group, self.medium, is_removal=True)
            else:
                tokens = self.tokens[stored_pages[start] * self.block_size : stored_pages[stop] * self.block_size]
                yield self._replace(events=part, tier=kind, is_mixed=False, tokens=tokens, num_positions=len(tokens))


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


# --- events of Mooncake's RFC #1527, and as `mooncake_master` sends them: maps with an `event_type` -------------------

_Name = Annotated[str, msgspec.Meta(max_length=256)] | None


class MooncakeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of any stream. Absent and null fields mean the same."""

    event_type: Literal["stored", "removed", "cleared"]
    model_name: _Name = None
    block_size: int | None = None
    additional_salt: _Name = None
    lora_name: _Name = None
    tenant_id: _Name = None
    backend_id: _Name = None
    """Owner of the pages. Not the instance that a router would choose."""
    medium: _Name = None
    dp_rank: int | None = None
    seq_hashes: list[int] = []
    """Rolling hashes. Empty if `mooncake_master` cannot read one from the object's key."""
    base_block_idx: int | None = None
    """Number of pages before the first one."""
    parent_hash: int | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]] | None = None
    """Required if the hashes are not the standard's."""

    @property
    def owner(self) -> str:
        """Key of the namespace in which the hashes are unique. Differs from keys of attention groups."""
        parts = (self.backend_id, self.additional_salt, self.lora_name)
        return "pool " + msgspec.json.encode([part or "" for part in parts]).decode()


_decoder = msgspec.msgpack.Decoder(MooncakeEvent)


def decode_mooncake_event(data: bytes | memoryview) -> MooncakeEvent:
    """Decode an event. Raises msgspec.DecodeError (ValidationError for a bad field), UnicodeDecodeError,
    RecursionError.
    """
    return _decoder.decode(data)


def may_remove(data: bytes | memoryview) -> bool:
    """Whether an event that cannot be decoded may have removed pages."""
    try:
        return bool(msgspec.msgpack.decode(data, type=dict[str, Any])["event_type"] != "stored")
    except (*UNREADABLE, KeyError):
        return True


Run: TypeAlias = PageRun | ClearedRun | MooncakeEvent | InvalidEvent
