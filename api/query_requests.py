"""Requests and answers of the hot routes, as msgspec structs. Fields that are not named here are ignored.

Two dialects: a request with `model_name` speaks the running peer's, one with `model` or `modelname` the RFC's.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kv_events.limits import MAX_TOKENS_PER_QUERY
from kvsight.schemas.queries import TierWeights

MAX_QUERIES_PER_BATCH = 1024
Numbers = TypeVar("Numbers")
"""How lists of numbers may come: `IntList` in JSON; in msgpack also as little-endian bytes; `Raw` to look at later."""

IntList: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS_PER_QUERY)]


class Prompt(msgspec.Struct, Generic[Numbers], frozen=True, kw_only=True):
    """What both dialects share. One of the first three says what is asked for."""

    token_ids: Numbers | UnsetType = UNSET
    """u32; msgpack: also packed."""
    seq_hashes: Numbers | UnsetType = UNSET
    """Rolling hashes, u64; msgpack: also packed."""
    block_hashes: Numbers | UnsetType = UNSET
    """Local hashes, i64; msgpack: also packed. Rolled here."""
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool | None = None
    """The workers' pages are of token pairs: so are those of `token_ids`. Hashes are what they are."""
    tier_weights: TierWeights | None = None
    """Weights of gpu, cpu, disk, external, in this order or by name: asks for `weighted`."""


class PeerQuery(Prompt[Numbers], Generic[Numbers], frozen=True, kw_only=True):
    """A question in the running peer's dialect."""

    model_name: str
    routing_group: str | None = None


class RfcQuery(Prompt[Numbers], Generic[Numbers], frozen=True, kw_only=True):
    """A question in the RFC's dialect."""

    model: str | UnsetType = UNSET
    modelname: str | UnsetType = UNSET
    block_size: int
    tenant_id: str | None = None
    instance_id: str | int | None = None
    """Ask for this worker alone."""
    block_hash: Numbers | UnsetType = UNSET
    """`seq_hashes` in the spelling of older drafts."""
    lora_id: str | int | None = None
    """Of older drafts: the adapter's number, which is its name where engines say no other. Not used beside a
    `lora_name`; 0 is the base model."""
    additionalsalt: str | None = None
    additional_salt: str | None = None
    """The cache salt where `cache_salt` is absent, in either spelling."""


class Probe(msgspec.Struct, frozen=True):
    """Enough of a question to know its dialect, and whether its objects are small enough to be made."""

    model_name: Raw | UnsetType = UNSET
    tier_weights: Raw | UnsetType = UNSET


class BatchQuery(msgspec.Struct, frozen=True):
    """Several questions, each in either dialect."""

    queries: Annotated[list[Raw], msgspec.Meta(max_length=MAX_QUERIES_PER_BATCH)]


class RawBatch(msgspec.Struct, frozen=True):
    """The same, to be cut into its questions later."""

    queries: Raw
