"""The address of a service, and its answers of GET /health, /ready and /shards, and of every error."""

import msgspec
from msgspec import UNSET, UnsetType

from kv_events.http.queries import Missing

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where a service answers that was started without a host and a port."""


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The process is healthy, or ready."""

    status: str
    recording: str = ""
    """Why the recording of `kvsight serve --record` is degraded. Left out if it is not."""


class Readiness(Status, frozen=True, kw_only=True):
    """The service is ready."""

    ready: bool
    schedulable_workers: int
    """Workers that POST /select may choose."""


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error (RFC 9457): for people (`detail`) and for programs (`type`, `field`, `value`).

    The defaults are for the errors of other servers, such as proxies, which may send only some of the fields.
    """

    type: str = "about:blank"
    """Such as `urn:kvsight:problem:unknown-model`; `about:blank`: the status says everything."""
    title: str = ""
    status: int = 0
    detail: str = ""
    field: str | UnsetType | None = UNSET
    value: bool | int | float | str | UnsetType | None = UNSET
    error: str = ""
    """Repeats `detail`: clients written for Dynamo look here."""


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
