"""Bodies of GET and POST /workers, GET /workers/{worker}/view and POST /workers/{worker}/resync."""

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
    """One worker with all its ranks, in Dynamo's dialect. None: unknown.

    Body of POST /workers, and part of all answers about workers. Fields without a description only pass through.
    """

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


State: TypeAlias = Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["live", "syncing", "stale", "expired"]})]
"""The state of a view, from the most to the least trustworthy. Clients accept other words, too."""


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """The stream of one DP rank, as the index sees it."""

    endpoint: str
    """The address of a registered engine, also for ranks that only its batches name; otherwise the stream's key in
    the log, tenant/model/worker/rank."""
    status: str
    """`active`, or `failed` once the view has expired. A registered engine is `pending` until it is connected, and
    `failed` while it cannot be reached."""
    state: State
    stale_reason: str = ""
    """Why the view is stale; empty otherwise."""
    age_ms: int
    """Milliseconds since the worker was last heard; for a bridged engine, since the bridge last heard the engine."""
    epoch: int
    """The publisher's incarnation; -1: no batch was applied yet."""
    seq: int
    """The number of the newest batch applied; -1: none yet."""
    pages: dict[str, int]
    """Medium -> pages held."""
    digest: str
    """The view's digest: 64 bytes in hex. Equals the digest of the publisher's newest batch."""
    counters: dict[str, int] = {}
    """Name -> count since this process knows the stream: batches, pages_stored, gaps, ..."""
    failure: str | None = None
    """Why a registered engine is not being read."""
    warning: str | None = None
    """What is wrong with a registered engine that is read all the same, and what that costs."""
    cause: str = ""
    """Why the view is not live, as precisely as this process knows: `failure`, the batches that were missed, or
    `stale_reason`; empty if it is live."""
    cause_since: float | None = None
    """When the cause began, in seconds since 1970. None: unknown."""
    remedy: str = ""
    """What to do about the cause, in one sentence; empty if nothing is known."""


class Worker(WorkerRecord, frozen=True, kw_only=True):
    """One worker of a model, with the fields of its record if it has one."""

    worker_id: InstanceId = ""
    """`instance_id` as in the record."""
    instance_id: str
    status: str
    """`active` if any rank is, else `pending` if any rank is, else `failed`."""
    block_size: int
    """Tokens per page. 0: unknown."""
    endpoints: dict[int, str] = msgspec.field(default_factory=dict)
    """DP rank -> endpoint."""
    listeners: dict[int, Listener]
    """DP rank -> stream."""
    state: State
    """The least trustworthy state among the ranks."""
    age_ms: int
    """The largest age among the ranks."""
    groups: dict[str, dict[int, Listener]] = msgspec.field(default_factory=dict)
    """Group -> DP rank -> stream: recurrent states and sliding windows of hybrid models. They do not enter into
    `status`, `state` and `age_ms`; answers to queries have the least trusted state of all."""
    source: str = ""
    """`zmq` for a registered engine, otherwise `log`."""


class ViewPage(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """One page of a radix view."""

    sequence_hash: int
    parent: int | None
    """Sequence hash of the parent page; None: the page has no parent, or the parent is unknown."""
    media: list[str]
    groups: dict[str, list[str]] | UnsetType = UNSET
    """Group -> media on which the worker's group stream holds the page: a window's KV or a state. Absent: no groups."""


class RadixView(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the radix view of one worker stream. Parts with equal epoch and seq belong to one state of the view."""

    model_name: str
    routing_group: str
    block_size: int
    """Tokens per page."""
    dp_rank: int
    state: State
    age_ms: int
    epoch: int
    seq: int
    num_pages: int
    """The length of `pages`."""
    pages: list[ViewPage]
    next_cursor: int | None
    """`cursor` for the next part; None: this is the last part."""


class ResyncAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """The streams whose publishers will be asked for a resync."""

    status: str = "requested"
    streams: list[str]
    """Keys: tenant/model/worker/rank."""
