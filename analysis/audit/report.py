"""What an audit finds, as structs that are printed or encoded as JSON. Times are seconds since 1970."""

import msgspec

from kv_events.http.explanations import BatchPosition

PAGE_COUNTS = {
    "stored": "stored",
    "removed": "removed",
    "churned": "evicted within {churn:g} s",
    "bounced": "back within {churn:g} s",
    "double": "stored although held",
    "orphan": "stored under an unknown parent",
    "unknown": "removed although not held",
    "swept": "dropped by clears and resyncs",
}
"""Names in `AuditReport.pages`, and what they count, in words. churn: `AuditReport.churn_s`."""


class Degraded(msgspec.Struct, kw_only=True):
    """A degraded reason of a publisher, see docs/wire.md."""

    text: str
    """As it was sent last."""
    since: float
    """When it was sent first."""
    times: int = 0
    """How often it began."""
    seconds: float = 0.0


class StreamReport(msgspec.Struct, kw_only=True):
    """What happened to one worker stream."""

    stream: str
    """tenant/model/worker/rank"""
    worker: str
    batches: int = 0
    heartbeats: int = 0
    bytes: int = 0
    epochs: int = 0
    restarts: int = 0
    """Later epochs in which the engine was heard. A bridge begins one also when it gives up an engine's pages."""
    gaps: int = 0
    missing_batches: int = 0
    earlier_batches: int = 0
    """Batches of the first epoch before the log begins. They are not missing, and count as no gap."""
    first_gap: BatchPosition | None = None
    """The batch that came after the first gap."""
    digest_mismatches: int = 0
    first_bad_batch: BatchPosition | None = None
    """The first batch after which the view differed from the publisher's ledger, without a gap before it."""
    resyncs: int = 0
    clears: int = 0
    duplicate_batches: int = 0
    old_epoch_batches: int = 0
    not_live_s: float = 0.0
    """Time during which the view was stale or syncing, or its publisher degraded, between two batches of the stream.

    A view that lacks the batches before the log counts from its first resync or gap on.
    """
    pages_held: int = 0
    """At the end, summed over the media."""
    engine_losses: int = 0
    """Batches that the publisher, which forwards them from the engine, reports as lost before they reached it."""
    degraded: dict[str, Degraded] = {}
    """The publisher's degraded reasons, without their numbers."""

    @property
    def lost_batches(self) -> int:
        """Batches that were lost on the way from the publisher, or before."""
        return self.missing_batches + self.engine_losses

    @property
    def trouble(self) -> tuple[int, int, float]:
        """How much went wrong. Compares."""
        return self.digest_mismatches, self.gaps + self.engine_losses, self.not_live_s


class Resync(msgspec.Struct, kw_only=True):
    """One resync and what it cost."""

    stream: str
    reason: str
    time: float
    seconds: float = 0.0
    batches: int = 0
    bytes: int = 0
    pages: int = 0
    """Pages that were sent again."""
    is_complete: bool = False
    """False: it was cut off, or the log ends in it."""


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a prompt that is used often."""

    sequence_hash: int
    pages: int
    requests: int
    """0 if the log has no decisions."""
    stores: int
    """How often a worker began to hold it."""
    workers: int = 0
    """Workers that hold its last page at the end of the log."""
    first_page: int
    """Sequence hash of its first page, as far as it is known."""
    text: str = ""
    """How it begins and ends, if a tokenizer was given and the log has tokens."""


class Rates(msgspec.Struct, kw_only=True):
    """Pages stored and removed, and records, per second."""

    pages_per_s: float = 0.0
    peak_pages_per_s: int = 0
    peak_time: float | None = None
    """None: no page was stored or removed."""
    records_per_s: float = 0.0
    bytes_per_s: float = 0.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of trouble."""

    kind: str
    weight: float
    """0 to 1: the share of what it affects, which `text` names."""
    text: str


class ExampleQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a request as the body of POST /query_by_hash, for `kvsight explain --prompt`."""

    model_name: str
    routing_group: str
    seq_hashes: list[int]


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A request of which tokens were lost."""

    request_id: str
    time: float
    worker: str
    """The worker that was chosen."""
    tokens: int
    """Tokens that were lost."""
    query: ExampleQuery
    better: str = ""
    """The candidate that the router scored higher than the chosen one, or the one that held more, compared with it:
    their scores, or what was booked on them. Empty: not known."""


class Loss(msgspec.Struct, kw_only=True):
    """Tokens lost from one step of the funnel to the next for one cause."""

    step: str
    """The step that has fewer tokens."""
    cause: str
    tokens: int = 0
    requests: int = 0
    share: float = 0.0
    """Of all prompt tokens."""
    examples: list[Example] = []
    """The largest three."""


class Funnel(msgspec.Struct, kw_only=True):
    """What became of the prompts' tokens. Each step equals the one before it, less its losses, plus its gains."""

    requests: int = 0
    outcomes: int = 0
    """Requests whose outcome is known."""
    prompt_tokens: int = 0
    held_in_fleet: int = 0
    """Held by the worker that held most, when the router chose."""
    held_by_chosen: int = 0
    predicted: int = 0
    delivered: int = 0
    losses: list[Loss] = []
    """Largest first."""
    gains: list[Loss] = []
    """Tokens that one step has and the step before it has not."""
    unmatched_outcomes: int = 0
    """Outcomes without a decision in the log."""
    duplicates: int = 0
    """Decisions and outcomes that repeat the id of an earlier one."""
    unknown_workers: dict[str, int] = {}
    """Worker that was chosen, and of which the log has no batch -> requests. At most 1024."""
    ties: dict[str, int] = {}
    """Worker -> requests for which it was chosen among several workers with the same best score."""
    early: int = 0
    """Requests that reused pages which, by the router's clock, were stored only after the choice."""
    early_s: float = 0.0
    """Median of the seconds from these choices to the stores, of at most the first 256. 0: not known."""

    @property
    def steps(self) -> dict[str, int]:
        """Step, in words -> tokens."""
        return {
            "prompts": self.prompt_tokens,
            "held in the fleet": self.held_in_fleet,
            "held by the chosen worker": self.held_by_chosen,
            "predicted": self.predicted,
            "delivered": self.delivered,
        }


class AuditReport(msgspec.Struct, kw_only=True):
    """The whole audit."""

    log: str
    verdict: str = ""
    findings: list[Finding] = []
    """Causes, the weightiest first."""
    records: int = 0
    bytes: int = 0
    first_time: float = 0.0
    last_time: float = 0.0
    damage: list[str] = []
    """Parts of the log that cannot be read."""
    unreadable: dict[str, int] = {}
    """Reason -> records that break the contract."""
    first_unreadable: int | None = None
    """Index of the first of them."""
    churn_s: float = 0.0
    """Seconds for which pages are expected to stay."""
    pages: dict[str, list[int]] = {}
    """Name -> pages for each medium, in the order GPU, CPU_PINNED, DISK, EXTERNAL. See `PAGE_COUNTS`.

    Bounced pages were on another medium meanwhile. Swept ones were dropped by a clear, a restart or a resync.
    """
    lifetime_p50_s: list[float | None] = []
    """Seconds for which half of the removed pages were held at most, for each medium. Pages that were held before the
    log do not count. None: none was removed."""
    orphans: int = 0
    """Pages held at the end whose parent is not held by their worker: no prompt can use them."""
    untracked: int = 0
    """Pages that are missing in `pages`, because there was no room for them."""
    rates: Rates = msgspec.field(default_factory=Rates)
    streams: list[StreamReport] = []
    resyncs: list[Resync] = []
    """Those that sent most pages, at most 20."""
    num_resyncs: int = 0
    resync_pages: int = 0
    hottest: list[HotPrefix] = []
    funnel: Funnel | None = None
    """None if the log has no decisions."""
