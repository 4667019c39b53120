"""The answer of GET /shards."""

from __future__ import annotations

import msgspec

from kv_events.http.queries import Missing


class ShardMember(msgspec.Struct, frozen=True):
    """A member of a shard group."""

    id: str
    """Chosen anew at each start of the process."""
    url: str
    partitions: list[int]
    """Those that the assignment gives to it."""


class Shards(msgspec.Struct, frozen=True):
    """A shard group as one member sees it."""

    group: str
    member: str
    """Id of the member that answers."""
    generation: int
    """Of the newest assignment. It grows with each one."""
    members: list[ShardMember]
    claims: dict[int, bool]
    """Partition that this member answers for -> whether its views are up to date with the log."""
    lent: list[int]
    """Partitions among them that another member is taking over."""
    missing: list[Missing]
    """What answers lack at the moment."""
