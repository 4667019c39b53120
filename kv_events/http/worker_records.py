"""The record of a worker: body of POST /workers, and answer of all routes about workers, in Dynamo's dialect."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kv_events.http.registrations import DpRank, Endpoint, InstanceId, MaybeEndpoint, MaybeName, Name
from kv_events.limits import MAX_BLOCK_SIZE, MAX_RANKS, URL_PATTERN
from kv_events.streams import DEFAULT_TENANT

_FEW = msgspec.Meta(max_length=64)

Url: TypeAlias = Annotated[str, msgspec.Meta(max_length=512, pattern=URL_PATTERN)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker with all its ranks. None: unknown. Fields without a description only pass through."""

    worker_id: InstanceId
    """The worker's name. Answers have a number if the name is one."""
    model_name: Name = "default"
    routing_group: Name = DEFAULT_TENANT
    lifecycle: Literal["schedulable", "draining", "incomplete", "unschedulable"] = "schedulable"
    """A `schedulable` worker gets new requests. A `draining` one gets none, and its bookings go on. An `incomplete` one
    lacks what the reasons name. An `unschedulable` one was deleted. Requests may say `draining`, or take it back."""
    not_schedulable_reasons: list[str] | UnsetType = UNSET
    """What an incomplete worker lacks. Ignored in requests."""
    role: Literal["", "prefill", "decode"] = ""
    """The part of requests that the worker computes. Empty: all."""
    endpoint: Url | None = None
    """Where the worker takes requests: http://HOST:PORT."""
    kv_events_endpoints: Annotated[dict[DpRank, Endpoint], msgspec.Meta(max_length=MAX_RANKS)] | UnsetType = UNSET
    """DP rank -> address of its events: tcp://HOST:PORT."""
    kv_events_endpoint: MaybeEndpoint = None
    """The same for a worker with one rank."""
    replay_endpoint: MaybeEndpoint = None
    """The replay socket of the first rank. The ports of further ranks count up from it."""
    block_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_SIZE)] | None = None
    """Tokens a page."""
    data_parallel_start_rank: DpRank | None = None
    """None means 0."""
    data_parallel_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)] | None = None
    """Ranks of the worker. None means 1."""
    is_eagle: bool | None = None
    """Whether the engine speculates with EAGLE or MTP, and so computes one more block of every prompt."""
    total_kv_blocks: Count | None = None
    """Pages that one rank has room for on its device."""
    max_num_batched_tokens: Count | None = None
    stable_routing_id: MaybeName = None
    taints: Annotated[list[Name], _FEW] = []
    topology_domains: Annotated[dict[Name, Name], _FEW] = {}
    kv_transfer_domain: MaybeName = None
    kv_transfer_enforcement: Literal["required", "preferred"] | None = None
    kv_transfer_preferred_weight: float | None = None

    @property
    def ranks(self) -> range:
        """The DP ranks of the worker."""
        first = self.data_parallel_start_rank or 0
        return range(first, first + (1 if self.data_parallel_size is None else self.data_parallel_size))

    @property
    def is_schedulable(self) -> bool:
        """Whether the worker gets new requests."""
        return self.lifecycle == "schedulable"
