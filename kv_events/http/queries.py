"""Answers of POST /query, /query_by_hash and /query/batch, in both dialects. Counts are tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kv_events.http.workers import State

TierWeights: TypeAlias = tuple[float, float, float, float] | dict[str, float]
"""The worth of a token on gpu, cpu, disk and external, in this order or by name. A field of requests."""


class PeerInstance(msgspec.Struct, frozen=True, kw_only=True):
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


class PeerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer in Dynamo's dialect."""

    scores: dict[str, dict[int, int]]
    """Worker -> DP rank -> tokens on the rank's device; ranks without any are left out."""
    frequencies: list[int] = []
    """Always empty, as in Dynamo."""
    instances: dict[str, PeerInstance]
    missing: list[Missing] | UnsetType = UNSET
    """What the answer lacks because a member of a shard group did not answer. Absent: nothing."""


class RankBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """What one DP rank holds, for a query with `hit_detail`: each page counts for its fastest tier only."""

    matched_tokens: int
    """On any tier."""
    npu_blocks: int
    """On the device, of whatever kind it is."""
    cpu_blocks: int
    disk_blocks: int
    """On disk or external."""


class RfcInstance(msgspec.Struct, frozen=True, kw_only=True):
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


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a batch: for each query, in order, a `PeerAnswer`, an `RfcAnswer` or a `ProblemDocument`."""

    results: list[Raw]
    missing: list[Missing] | UnsetType = UNSET
    """See `PeerAnswer`, for all results."""
