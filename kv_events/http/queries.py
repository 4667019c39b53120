"""Bodies of POST /query, /query_by_hash and /query/batch, in both dialects. Counts are tokens.

A request with `model_name` uses Dynamo's dialect, one with `model` or `modelname` the RFC's. Its unknown fields are
ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kv_events.http.workers import State
from kv_events.limits import MAX_EXTRA_KEY_BYTES, MAX_TOKENS_PER_QUERY

TierWeights: TypeAlias = tuple[float, float, float, float] | dict[str, float]
"""The worth of a token on gpu, cpu, disk and external, in this order or by name. A field of requests."""


MAX_QUERIES_PER_BATCH = 1024
MAX_MEDIA = 1024
"""Images, videos and sounds in a prompt."""
NumberList = TypeVar("NumberList")
"""Forms of lists of numbers: `IntList` in JSON; in msgpack also little-endian bytes."""

IntList: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS_PER_QUERY)]


class MediaSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An image, a video or a sound in a prompt, and the place of its tokens."""

    hash: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_EXTRA_KEY_BYTES)]
    """The identifier under which the engine caches it."""
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS_PER_QUERY)]
    """Its first token."""
    length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS_PER_QUERY)]
    """Its tokens."""


class PromptFields(msgspec.Struct, Generic[NumberList], frozen=True, kw_only=True):
    """Fields of both dialects. One of the first three contains the prompt."""

    token_ids: NumberList | UnsetType = UNSET
    """u32; msgpack: also packed."""
    seq_hashes: NumberList | UnsetType = UNSET
    """Sequence hashes, u64; msgpack: also packed."""
    block_hashes: NumberList | UnsetType = UNSET
    """Local hashes, i64; msgpack: also packed. The service rolls them."""
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool | None = None
    """Pages consist of token pairs. Applies to `token_ids`, not to hashes."""
    media: Annotated[tuple[MediaSpan, ...], msgspec.Meta(max_length=MAX_MEDIA)] = ()
    """What the prompt contains besides text. Applies to `token_ids`, not to hashes, which already contain it."""
    tier_weights: TierWeights | None = None
    """Weights of gpu, cpu, disk, external, in this order or by name. The answer then contains `weighted`."""


class PeerQuery(PromptFields[NumberList], Generic[NumberList], frozen=True, kw_only=True):
    """A query in Dynamo's dialect."""

    model_name: str
    routing_group: str | None = None


class RfcQuery(PromptFields[NumberList], Generic[NumberList], frozen=True, kw_only=True):
    """A query in the RFC's dialect."""

    model: str | UnsetType = UNSET
    modelname: str | UnsetType = UNSET
    block_size: int
    tenant_id: str | None = None
    instance_id: str | int | None = None
    """Restrict the answer to this worker."""
    block_hash: NumberList | UnsetType = UNSET
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


class DialectFields(msgspec.Struct, frozen=True):
    """The part of a query that shows its dialect and whether its objects are small enough to be created."""

    model_name: Raw | UnsetType = UNSET
    model: Raw | UnsetType = UNSET
    modelname: Raw | UnsetType = UNSET
    tier_weights: Raw | UnsetType = UNSET


class BatchQuery(msgspec.Struct, frozen=True):
    """Several queries, each in either dialect."""

    queries: Annotated[list[Raw], msgspec.Meta(max_length=MAX_QUERIES_PER_BATCH)]


class PeerInstance(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The tokens of a prompt that one worker can reuse. Each tier includes the faster ones."""

    longest_matched: int
    gpu: int
    dp: dict[int, int]
    """DP rank -> tokens on its device."""
    cpu: int
    disk: int
    external: int
    state: State
    age_ms: int
    matched_dp: dict[int, int] | UnsetType = UNSET
    """DP rank -> tokens on any tier. Absent: equal to `dp`."""
    weighted: float | UnsetType = UNSET
    """Tokens by tier weight, where the query gave weights."""
    weighted_dp: dict[int, float] | UnsetType = UNSET
    """DP rank -> the rank's own tokens by weight; `weighted` takes each tier from the rank that holds most there.
    Absent: the worker has one rank."""


class Missing(msgspec.Struct, frozen=True):
    """Partitions of the log whose workers are not in an answer of a shard group, or not up to date."""

    partitions: list[int]
    since: float
    """Seconds since 1970 by the clock of the member that answers."""
    member: str
    """Address of the member that keeps them."""
    reason: str


class PeerAnswer(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The answer in Dynamo's dialect."""

    scores: dict[str, dict[int, int]]
    """Worker -> DP rank -> tokens on the rank's device; ranks without any are left out."""
    frequencies: list[int] = []
    """Always empty, as in Dynamo."""
    instances: dict[str, PeerInstance]
    missing: list[Missing] | UnsetType = UNSET
    """What the answer lacks because a member of a shard group did not answer. Absent: nothing."""
    hint: str | UnsetType = UNSET
    """Why no worker can hold any of the prompt: it is shorter than a page. Absent: it is not."""


class RankBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """What one DP rank holds, for a query with `hit_detail`: each page counts for its fastest tier only."""

    matched_tokens: int
    """On any tier."""
    npu_blocks: int
    """On the device, of whatever kind it is."""
    cpu_blocks: int
    disk_blocks: int
    """On disk or external."""


class RfcInstance(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The tokens of a prompt that one worker can reuse. Each tier includes the faster ones."""

    longest_matched: int
    gpu: int = msgspec.field(name="GPU")
    cpu: int = msgspec.field(name="CPU")
    disk: int = msgspec.field(name="DISK")
    external: int = msgspec.field(name="EXTERNAL")
    dp: Mapping[int, int | RankBlocks] = msgspec.field(name="DP")
    """DP rank -> tokens on its device; with `hit_detail`, what it holds on each tier."""
    state: State
    age_ms: int
    matched_dp: dict[int, int] | UnsetType = UNSET
    """See `PeerInstance`, for this field and those below."""
    weighted: float | UnsetType = UNSET
    weighted_dp: dict[int, float] | UnsetType = UNSET


RfcAnswer: TypeAlias = dict[str, dict[str, RfcInstance]]
"""Tenant -> worker -> what it holds: the answer in the dialect of the Mooncake RFC."""


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The answer to a batch: for each query, in order, a `PeerAnswer`, an `RfcAnswer` or a `ProblemDocument`."""

    results: list[Raw]
    missing: list[Missing] | UnsetType = UNSET
    """See `PeerAnswer`, for all results."""
