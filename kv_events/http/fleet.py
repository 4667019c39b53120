"""Answers of GET /fleet, GET /residency and GET /funnel: what the page at `/` shows. Times are seconds since 1970."""

from typing import Annotated, TypeAlias

import msgspec

from kv_events.http.workers import State

Level: TypeAlias = Annotated[
    str, msgspec.Meta(extra_json_schema={"enum": ["ok", "warning", "trouble", "empty", "starting"]})
]
"""How the fleet is: `ok`, `warning` (workers left or are being resynchronised), `trouble`, `empty` (no worker) or
`starting`. Clients accept other words, too."""


class StateChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change in the life of one rank, in the words of the service's log lines."""

    time: float
    dp_rank: int
    event: str
    """`joined`, `restarted`, `left`, `expired`, `came back`, `is stale`, `is live again`."""
    reason: str = ""


class _Health(msgspec.Struct, frozen=True, kw_only=True):
    """How far a view can be trusted, or that of a worker: then the least trustworthy one among its ranks."""

    state: State
    reason: str = ""
    """Why the view cannot be fully trusted; empty if it can."""
    endpoint: str = ""
    """The address of a registered engine; empty otherwise."""
    cause: str = ""
    """See `Listener.cause`."""
    remedy: str = ""
    """What to do about it, in one sentence; empty if nothing is known."""
    since: float | None = None
    """When the cause began; otherwise the time of the newest change of state. None: before the service started."""
    age_s: float
    """Seconds since the worker was last heard."""
    agreed_at: float | None = None
    """When the digests of view and publisher were equal for the last time; the earliest among ranks. None: not yet."""
    missing_batches: int = 0
    """Batches that are known to be lost, until the digests are equal again; before a bridge, as long as it says so."""
    is_resync_requested: bool = False
    pages: dict[str, int]
    """Medium -> pages held."""


class FleetRank(_Health, frozen=True, kw_only=True):
    """The stream of one DP rank, or one of its group streams."""

    dp_rank: int
    group: str = ""
    """`mamba`, `swa:N` or another group of a hybrid model. Empty: the main stream."""
    stream: str
    """The stream's key in the log: tenant/model/worker/rank."""
    epoch: int
    seq: int


class FleetWorker(_Health, frozen=True, kw_only=True):
    """One worker of a model. Counts are sums over its ranks, since this process knows it. The state is without group
    streams, and what belongs to a state is that of a rank with it."""

    worker: str
    model: str
    tenant: str
    block_size: int
    """Tokens per page."""
    can_resync: bool = False
    """Whether a publisher listens whose answer would mend the view."""
    can_forget: bool = False
    """Whether POST /unregister takes it: a registered engine, or an expired worker of a log that others write."""
    capacity: dict[str, int] = {}
    """Medium -> pages for which all its ranks together have room. Media of which a rank's room is unknown are left
    out."""
    booked: dict[str, int] = {}
    """What is reserved on its ranks: `requests`, `prefill_tokens` that are still to be computed, `decode_pages`. Empty:
    nothing."""
    lifetime_s: float | None = None
    """How long a page stays on average before it is removed: pages held by pages removed per second, in the time of
    `removed`. None: none was removed."""
    lifetime_p50_s: float | None = None
    """Seconds for which half of the pages that it removed lately from its device were held at most, from one page in
    256. Pages are followed while somebody asks for the fleet. None: none of them was removed, or this is a moment of a
    log."""
    peak_pages: int
    """The most pages that it held, on all media together, since this process knows it."""
    stored: list[float]
    """Pages stored per second in each interval, oldest first."""
    removed: list[float]
    """Pages removed per second: evicted, cleared or not resent."""
    batches: int
    resyncs: int
    gaps: int
    restarts: int
    ranks: list[FleetRank]
    changes: list[StateChange]
    """Newest first."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """All workers at one moment, and whether the views are true."""

    time: float
    is_past: bool = False
    """Whether this is a moment of a log that is replayed."""
    level: Level
    verdict: list[str | float]
    """One or two sentences, in parts. A number is a time."""
    states: dict[str, int]
    """State -> workers."""
    num_workers: int
    num_selected: int
    """Workers that `contains` selects. `workers` has at most `limit` of them."""
    duplicated: float = 0.0
    """Share of all held pages that are further copies, on another worker or tier."""
    interval_s: float
    """Length of the intervals of `stored` and `removed`."""
    workers: list[FleetWorker]
    """Those in trouble first."""


class ResidencyNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """An index that can be shown."""

    model: str
    tenant: str
    block_size: int
    workers: int
    pages: int
    """Distinct pages."""


class ResidencyColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A worker stream of the map."""

    worker: str
    dp_rank: int
    state: State


class ResidencyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix: the pages from the beginning of a prompt to one page."""

    hash: str
    """Sequence hash of its last page, 16 hex digits."""
    pages: int
    holders: int
    """Worker streams that hold its last page."""
    cells: list[tuple[int, int, int, int, int]]
    """For each stream that holds the first page: its column, and the leading pages of the prefix that it holds on gpu,
    cpu, disk and external, on each tier or a faster one."""


class Residency(msgspec.Struct, frozen=True, kw_only=True):
    """The most used prefixes of a namespace, and who holds how much of them."""

    time: float
    namespaces: list[ResidencyNamespace]
    """All that can be shown, largest first."""
    model: str
    tenant: str
    block_size: int
    """Of the namespace that is shown. 0: there is none."""
    num_columns: int
    """Worker streams of the namespace. `columns` has at most 128 of them."""
    columns: list[ResidencyColumn]
    rows: list[ResidencyRow]
    """A prefix ends where fewer workers hold its next page. Those of which most is held more than once come first."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text."""

    model_name: str
    text: Annotated[str, msgspec.Meta(min_length=1)]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text."""

    token_ids: list[int]


class RecentDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What a router or a service chose for one request, and what the engine reused."""

    request_id: str
    time: float
    model: str
    tenant: str
    worker: str
    dp_rank: int | None
    prompt_tokens: int
    best_tokens: int | None
    """The most tokens that any candidate held, as whoever chose saw it. None: the candidates are not known."""
    predicted_tokens: int | None
    cached_tokens: int | None = None
    """What the engine found in its cache. None: not reported (yet)."""


class FunnelSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over requests."""

    requests: int = 0
    prompt_tokens: int = 0
    best_tokens: int = 0
    """What the best candidate held. Where the candidates are not known: what was predicted."""
    predicted_tokens: int = 0
    cached_tokens: int = 0


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that somebody held and that were computed all the same, of the last hour."""

    cause: str
    """`choice`: another candidate held more than what was predicted for the chosen worker. `engine`: the engine
    delivered less than was predicted."""
    worker: str
    """The chosen worker."""
    requests: int
    tokens: int
    example: RecentDecision
    """The newest such request."""
    explain: str = ""
    """A body of POST /explain about it, as text, because JavaScript cannot hold its hashes as numbers. Empty: the
    decision named no pages."""


class DecisionFunnel(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of the last hour, by their times."""

    time: float
    window_s: float
    all: FunnelSums
    finished: FunnelSums
    """Only requests whose outcome was reported."""
    decisions: list[RecentDecision]
    """Newest first, at most 50."""
    lost: dict[str, int] = {}
    """Cause -> tokens, of the last hour."""
    losses: list[Loss] = []
    """By cause and worker, the largest first, at most 20."""
    step_s: float = 60.0
    """Length of the steps of `curve`."""
    curve: list[FunnelSums] = []
    """Sums over the steps before `time`, oldest first: of finished requests, or of all if no outcome was reported."""
