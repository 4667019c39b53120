"""Bodies of POST /register and POST /unregister. Unknown fields are ignored.

The dialect is selected as for queries: a request with `model_name` uses Dynamo's, one with `modelname` or `model` the
RFC's.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kv_events.limits import MAX_BLOCK_SIZE, MAX_DP_RANK, MAX_NAME_BYTES
from kv_events.streams import MAX_GROUP_SIZE

MAX_ENDPOINT_LENGTH = 512

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
MaybeName: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)] | None
"""Empty counts as absent."""
InstanceId: TypeAlias = Annotated[int, msgspec.Meta(ge=0)] | Name
"""A number is converted to its decimal digits."""
MaybeEndpoint: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_ENDPOINT_LENGTH)] | None
"""Empty counts as absent."""
Endpoint: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_ENDPOINT_LENGTH)]
MediumEndpoints: TypeAlias = Annotated[dict[Name, MaybeEndpoint], msgspec.Meta(max_length=16)]
DpRank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_DP_RANK)]
BlockSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]


class _Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both dialects."""

    instance_id: InstanceId
    """The worker's name in answers."""
    block_size: BlockSize | None = None
    """Tokens a page. None: it is learned from the first store."""
    dp_rank: DpRank | None = None
    """None means 0."""
    replay_endpoint: MaybeEndpoint = None
    eagle: bool = False
    """Whether the engine speculates with EAGLE or MTP, and so computes one more block of every prompt."""
    count_copies: bool = True
    """Whether each store of a block adds a copy. False where vLLM's requests ask for `kv_cache_report_mode: full`."""
    attention_chunk_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUP_SIZE)] | None = None
    """Tokens of a chunk of chunked local attention, if the model has any."""
    capacity: Annotated[dict[Name, Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(max_length=4)] = {}
    """Tier (gpu, cpu, disk, external) -> pages that the rank has room for. Others are unknown."""
    metrics_url: MaybeEndpoint = None
    """The engine's own metrics, http://HOST:PORT/metrics: they say its load and how many pages fit on its device."""


class PeerRegistration(_Registration, frozen=True, kw_only=True):
    """One rank of an engine, in Dynamo's dialect."""

    model_name: Name
    endpoint: Endpoint
    """Address of the rank's events: tcp://HOST:PORT."""
    routing_group: MaybeName = None


class RfcRegistration(_Registration, frozen=True, kw_only=True):
    """One rank of an engine, in the RFC's dialect. `type` is not needed, because event formats are detected."""

    modelname: Name | UnsetType = UNSET
    model: Name | UnsetType = UNSET
    endpoint: MaybeEndpoint = None
    """Address of the rank's events: tcp://HOST:PORT."""
    medium_endpoints: MediumEndpoints = {}
    """Medium -> address, instead of `endpoint`. What is read are the events of the device (npu, gpu, xpu), which name
    pages of all media. Another address of cpu or disk belongs to a pool and is not read."""
    tenant_id: MaybeName = None
    lora_name: MaybeName = None
    """Adapter of pages whose events contain none."""
    additionalsalt: MaybeName = None
    additional_salt: MaybeName = None
    """Salt of pages whose events contain none, in either spelling."""


class PeerUnregistration(msgspec.Struct, frozen=True, kw_only=True):
    """A request to unregister, in Dynamo's dialect."""

    instance_id: InstanceId
    model_name: Name
    dp_rank: DpRank | None = None
    """None means all ranks."""
    routing_group: MaybeName = None
    """None means all routing groups."""


class RfcUnregistration(msgspec.Struct, frozen=True, kw_only=True):
    """A request to unregister, in the RFC's dialect."""

    instance_id: InstanceId
    modelname: Name | UnsetType = UNSET
    model: Name | UnsetType = UNSET
    dp_rank: DpRank | None = None
    """None means all ranks."""
    tenant_id: MaybeName = None


class PeerRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """The rank was registered or unregistered (Dynamo's dialect)."""

    status: str = "ok"


class RfcRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """The rank was registered (the RFC's dialect)."""

    status: str = "registered successfully"
    instance_id: str | int


class RfcUnregistered(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks were unregistered (the RFC's dialect)."""

    status: str = "unregistered successfully"
    removed_instances: list[str]
    """`<instance>|<tenant>|<rank>` each."""
