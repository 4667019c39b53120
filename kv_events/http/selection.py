"""Bodies of the selection service, in the dialect of Dynamo 1.6.1, with additions. Unknown fields are ignored.

A request names its prompt by `token_ids`, or by `block_hashes` (local), `sequence_hashes` and `isl_tokens`. Or it is
the body of a request for an engine, with text.
"""

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kv_events.http.queries import MAX_MEDIA, MediaSpan
from kv_events.http.registrations import DpRank, InstanceId, Name
from kv_events.limits import MAX_HASHES_PER_QUERY, MAX_REQUEST_ID_BYTES, MAX_TOKENS_PER_QUERY, MAX_TOKENS_PER_REQUEST

_Id: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID_BYTES)]
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS_PER_REQUEST)]
Hashes: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=MAX_HASHES_PER_QUERY)]
"""Hashes of 64 bits, with or without sign."""
WorkerName: TypeAlias = str | int
"""A name of decimal digits is a number in answers, as in Dynamo."""


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a worker."""

    worker_id: InstanceId
    dp_rank: DpRank


class AffinityTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is preferred while it costs less than twice as much as the best one."""

    worker_id: InstanceId
    dp_rank: DpRank | None = None


class SessionContext(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation of a request."""

    session_id: _Id


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of the policy for one request. Absent: its defaults."""

    prefill_load_scale: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    router_temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None


class _Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all requests about a prompt."""

    model_name: Name = "default"
    routing_group: Name = "default"
    token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS_PER_QUERY)] | UnsetType = UNSET
    sequence_hashes: Hashes | UnsetType = UNSET
    isl_tokens: _Tokens | None = None
    """Tokens of the prompt. Default: as many as its pages have."""
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool | None = None
    session_id: _Id | None = None


class SelectRequest(_Prompt, frozen=True, kw_only=True):
    """A request to be placed."""

    block_hashes: Hashes | UnsetType = UNSET
    media: Annotated[tuple[MediaSpan, ...], msgspec.Meta(max_length=MAX_MEDIA)] = ()
    """What `token_ids` contain besides text."""
    selection_id: _Id | None = None
    """Name of the reservation. Default: a new one."""
    allowed_worker_ids: Annotated[list[InstanceId], msgspec.Meta(max_length=4096)] | None = None
    pinned_worker: Pinned | None = None
    affinity_target: AffinityTarget | None = None
    session_context: SessionContext | None = None
    priority_jump: float = 0.0
    strict_priority: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    expected_output_tokens: _Tokens | None = None
    """Accepted and not used, as are `routing_constraints`."""
    routing_constraints: dict[str, Any] | None = None
    router_config_override: PolicyOptions | None = None
    explain: bool = False
    """Whether the answer says why."""
    sources: bool = False
    """Whether the answer says where the pages can be fetched that the worker lacks."""


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompt that the worker holds. Each tier includes the faster ones."""

    longest_matched: int
    gpu: int
    dp: dict[int, int]
    """DP rank -> tokens on its device."""
    cpu: int
    disk: int
    predicted: int | UnsetType = UNSET
    """Tokens on the device of the chosen rank, with those that earlier decisions bring there. Absent: none."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where pages can be fetched that the chosen worker lacks."""

    start: int
    """First page of the prompt."""
    end: int
    """The page behind the last one."""
    worker_id: WorkerName
    dp_rank: int
    medium: str
    endpoint: str | None


class WeighedCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate, as the policy saw it."""

    worker_id: WorkerName
    dp_rank: int
    cost: float
    """The lowest one wins. With three decimals."""
    tokens: int
    """Tokens of the prompt that it holds on its device, with predicted ones."""
    prefill_tokens: int
    requests: int
    """What is booked there."""


class PrefillWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that computes the prompt first."""

    worker_id: WorkerName
    dp_rank: int
    endpoint: str | None


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The worker of a request."""

    selection_id: str | UnsetType = UNSET
    sequence_hashes: list[int] | UnsetType = UNSET
    """Of the prompt's complete pages, with sign. Present if the request is reserved, as the next two."""
    isl_tokens: int | UnsetType = UNSET
    track_prefill_tokens: bool | UnsetType = UNSET
    model_name: str
    routing_group: str
    worker_id: WorkerName
    dp_rank: int
    endpoint: str | None
    """Where the worker answers requests. None: it was not told to this service."""
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    """Tokens that the worker must compute, those on slower tiers in part."""
    potential_decode_blocks: int
    """Pages that are booked on the rank, with those of this prompt."""
    prefill: PrefillWorker | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    candidates: list[WeighedCandidate] | UnsetType = UNSET
    """The three candidates with the lowest costs."""
    sources: list[Source] | UnsetType = UNSET
    degraded: str | UnsetType = UNSET
    """Why the choice is not as good as usual. Absent: it is."""


class ReserveRequest(_Prompt, frozen=True, kw_only=True):
    """A reservation of what `POST /select` answered, or of what the caller chose: then with a `worker_id`."""

    selection_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_ID_BYTES)]
    worker_id: InstanceId | None = None
    dp_rank: DpRank | None = None
    effective_prefill_tokens: _Tokens = 0


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was reserved."""

    selection_id: str
    model_name: str
    routing_group: str
    worker_id: WorkerName
    dp_rank: int
    endpoint: str | None


class OutputBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A request has filled another page with output."""

    decay_fraction: float | None = None
    """How much the pages count from now on that only this request has, 0 .. 1."""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The request was followed."""

    status: str = "ok"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is booked on a rank."""

    worker_id: WorkerName
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    reported_requests: int | UnsetType = UNSET
    """Requests that the engine says it has, running and waiting. Absent: it does not say, or not lately."""
    reported_blocks: int | UnsetType = UNSET


class ModelLoads(msgspec.Struct, frozen=True, kw_only=True):
    """What is booked on the workers of a model."""

    model_name: str
    routing_group: str
    loads: list[Load]
    pending_count: int = 0
    """Always 0, as the next one: requests do not wait in this service."""
    pending_isl_tokens: int = 0


class RankOverlap(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of a prompt that a rank holds."""

    worker_id: WorkerName
    dp_rank: int
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    host_pinned_extension_blocks: int
    """Pages behind those on the device that the host has; on disks, pages behind those on the host."""
    disk_extension_blocks: int
    shared_beyond_device_blocks: int | None = None


class SharedCache(msgspec.Struct, frozen=True, kw_only=True):
    """Always as it is here: there is no shared cache besides the tiers of the workers."""

    enabled: bool = False
    total_hit_blocks: int = 0
    ranges: list[int] = []
    error: str | None = None


class OverlapScores(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of a prompt that all ranks hold."""

    block_size: int
    num_blocks: int
    workers: list[RankOverlap]
    shared_cache: SharedCache = SharedCache()
