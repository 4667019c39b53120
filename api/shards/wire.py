"""The form in which the members of a group talk to each other: msgpack, over `POST /shards/query`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from api.query_requests import MAX_QUERIES_PER_BATCH
from indexer.shards.assignment import Assignment

MISSING_HEADER = "Kvsight-Missing"
"""Header of an answer that lacks partitions, which it names."""
PATH = "/shards/query"
ANY_BLOCK_SIZE = 0

MAX_NAMES = 100
"""Bound on the names of models that a member tells a caller of an unknown one."""


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One prompt."""

    model: str
    tenant: str
    hashes: dict[int, bytes]
    """Block size -> the prompt's sequence hashes, little-endian u64. `ANY_BLOCK_SIZE`: they suit every size."""


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """What one member asks another one."""

    generation: int
    """That of the newest assignment that the asking member knows."""
    prompts: Annotated[list[Ask], msgspec.Meta(max_length=MAX_QUERIES_PER_BATCH)]


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a prompt that one stream holds, in tokens. See `indexer.scores.StreamScore`."""

    partition: int
    worker: str
    dp_rank: int
    gpu: int
    cpu: int
    disk: int
    external: int
    state: int
    """Index in `indexer.views.STATES`."""
    age_ms: int
    reusable: int | None


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one prompt."""

    block_sizes: list[int]
    """Those that the member's workers of the model use. Sizes for which it got no hashes have no rows."""
    rows: list[Row]
    known: list[tuple[str, str]]
    """Models and tenants of this member, if it does not know the one that was asked for."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What one member tells another one."""

    member: str
    generation: int
    claims: dict[int, bool]
    """Partition that the member answers for -> whether its views are up to date with the log."""
    found: list[Found]
    assignment: Assignment | None = None
    """The newest assignment, if the asking member has an older one."""


encode = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_told = msgspec.msgpack.Decoder(Told).decode
