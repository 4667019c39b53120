"""Requests of the hot routes, as msgspec structs. Unknown fields are ignored.

There are two dialects: a request with `model_name` uses Dynamo's, one with `model` or `modelname` the RFC's.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kv_events.http.queries import TierWeights
from kv_events.limits import MAX_TOKENS_PER_QUERY

MAX_QUERIES_PER_BATCH = 1024
Numbers = TypeVar("Numbers")
"""Forms of lists of numbers: `IntList` in JSON; in msgpack also little-endian bytes."""

IntList: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS_PER_QUERY)]


class Prompt(msgspec.Struct, Generic[Numbers], frozen=True, kw_only=True):
    """Fields of both dialects. One of the first three contains the prompt."""

    token_ids: Numbers | UnsetType = UNSET
    """u32; msgpack: also packed."""
    seq_hashes: Numbers | UnsetType = UNSET
    """Sequence hashes, u64; msgpack: also packed."""
    block_hashes: Numbers | UnsetType = UNSET
    """Local hashes, i64; msgpack: also packed. The service rolls them."""
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool | None = None
    """Pages consist of token pairs. Applies to `token_ids`, not to hashes."""
    tier_weights: TierWeights | None = None
    """Weights of gpu, cpu, disk, external, in this order or by name. The answer then contains `weighted`."""


class PeerQuery(Prompt[Numbers], Generic[Numbers], frozen=True, kw_only=True):
    """A query in Dynamo's dialect."""

    model_name: str
    routing_group: str | None = None


class RfcQuery(Prompt[Numbers], Generic[Numbers], frozen=True, kw_only=True):
    """A query in the RFC's dialect."""

    model: str | UnsetType = UNSET
    modelname: str | UnsetType = UNSET
    block_size: int
    tenant_id: str | None = None
    instance_id: str | int | None = None
    """Restrict the answer to this worker."""
    block_hash: Numbers | UnsetType = UNSET
    """`seq_hashes` in older drafts."""
    lora_id: str | int | None = None
    """In older drafts: the adapter's number, used as its name if engines send no name. Ignored with `lora_name`; 0 is
    the base model.
    """
    additionalsalt: str | None = None
    additional_salt: str | None = None
    """The cache salt if `cache_salt` is absent, in either spelling."""
    hit_detail: bool | int | str | None = None
    """`DP` holds objects with the pages by tier, as in MindIE-PyMotor, and the answer has the encoding of the request.
    Not with false, 0 and an empty text."""


class Probe(msgspec.Struct, frozen=True):
    """The part of a query that shows its dialect and whether its objects are small enough to be created."""

    model_name: Raw | UnsetType = UNSET
    tier_weights: Raw | UnsetType = UNSET


class BatchQuery(msgspec.Struct, frozen=True):
    """Several queries, each in either dialect."""

    queries: Annotated[list[Raw], msgspec.Meta(max_length=MAX_QUERIES_PER_BATCH)]
