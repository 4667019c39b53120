"""The messages of the members of a group: msgpack, over `POST /shards/query`."""

from typing import Annotated

import msgspec

from indexer.shards.assignment import MAX_PARTITIONS, Assignment
from indexer.views import STATES
from kv_events.http.queries import MAX_QUERIES_PER_BATCH
from kv_events.limits import MAX_BLOCK_SIZE, MAX_DP_RANK, MAX_NAME_BYTES

PATH = "/shards/query"
ANY_BLOCK_SIZE = 0

MAX_BLOCK_SIZES = 64
"""Bound on the block sizes of a model that a member names: each costs a hashing of the prompt."""
MAX_NAMES = 100
"""Bound on the names of models in the answer to a query about an unknown one."""

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Partition = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]


class ShardPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One prompt."""

    model: str
    tenant: str
    hashes: dict[int, bytes]
    """Block size -> the prompt's sequence hashes, little-endian u64. `ANY_BLOCK_SIZE`: they suit every size."""
    num_positions: _Number | None = None
    """Tokens of the prompt. None: not known."""


class ShardRequest(msgspec.Struct, frozen=True, array_like=True):
    """What one member asks another one."""

    generation: _Number
    """That of the newest assignment that the asking member knows."""
    prompts: Annotated[list[ShardPrompt], msgspec.Meta(max_length=MAX_QUERIES_PER_BATCH)]


class StreamRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a prompt that one stream can reuse, in tokens. See `indexer.scores.StreamScore`."""

    partition: _Partition
    worker: _Name
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=MAX_DP_RANK)]
    gpu: _Number
    cpu: _Number
    disk: _Number
    external: _Number
    state: Annotated[int, msgspec.Meta(ge=0, lt=len(STATES))]
    """Index in `indexer.views.STATES`."""
    age_ms: _Number


class PromptRows(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one prompt."""

    block_sizes: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]], msgspec.Meta(max_length=MAX_BLOCK_SIZES)
    ]
    """Those that the member's workers of the model use. Sizes for which it got no hashes have no rows."""
    rows: list[StreamRow]
    known: Annotated[list[tuple[_Name, _Name]], msgspec.Meta(max_length=MAX_NAMES)]
    """Models and tenants of this member, if it does not know the one that was asked for."""


class ShardReply(msgspec.Struct, frozen=True, array_like=True):
    """What another member answers."""

    member: str
    generation: _Number
    claims: Annotated[dict[_Partition, bool], msgspec.Meta(max_length=MAX_PARTITIONS)]
    """Partition that the member answers for -> whether its views are up to date with the log."""
    found: Annotated[list[PromptRows], msgspec.Meta(max_length=MAX_QUERIES_PER_BATCH)]
    assignment: Assignment | None = None
    """The newest assignment, if the asking member has an older one."""


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ShardRequest).decode
decode_reply = msgspec.msgpack.Decoder(ShardReply).decode
