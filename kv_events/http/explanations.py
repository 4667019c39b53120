"""Bodies of POST /explain and `kvsight explain --json`. Pages of a prompt are counted from 1."""

from typing import Annotated, TypeAlias

import msgspec

from kv_events.http.workers import State

CAUSES = {
    "held": "the whole prompt is held on the device",
    "never_stored": "the page was never stored, as far as the log goes back",
    "other_prompt": "the page was never stored, but other pages after the one before it",
    "stored_later": "the page is stored later than at the moment asked for",
    "held_elsewhere": "the page was never stored here, and another worker holds it",
    "evicted": "the page was stored and evicted",
    "moved": "the page was moved to a slower tier",
    "slower_tier": "the page was stored on a slower tier and never on this one",
    "cleared": "the worker cleared its cache",
    "restarted": "the engine or its publisher restarted",
    "not_resent": "the page was not among those that a resync sent",
    "lost_batches": "batches are missing in the log, and no resync has ended since",
    "before_the_log": "the log begins after the worker's first batch, and no resync has ended since",
    "stale": "the view is not right, so the page may be missing only in the view",
    "index_full": "the index had no room for the page",
    "expired": "the worker was silent or closed, so it is left out of answers",
    "not_known_yet": "the first batch of the worker comes later",
    "other_namespace": "the page is stored under another namespace",
    "group": "a group of layers, such as a sliding window or a recurrent state, ends the reusable prefix",
    "last_token": "the prompt ends with the page, whose last token the engine computes in any case",
    "hidden": "the page is held, but hidden by a hole further up",
    "partial_page": "the end of the prompt is shorter than a page",
}
"""Cause -> its meaning."""

Cause: TypeAlias = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(CAUSES)})]
"""A key of `CAUSES`. Clients accept other words, too."""


class ExplainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has besides the fields of a query, in either dialect."""

    worker: str | None = None
    """The only worker to explain. Default: `instance_id` in the RFC's dialect, otherwise all workers."""
    at: float | None = None
    """The moment in seconds since 1970. Default: the end of the log."""


class BatchPosition(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, and where its record is in the log."""

    index: int | None = None
    """Index of the record in an event log. None: a topic has none."""
    partition: int
    offset: int
    time: float
    """Time of the record, in seconds since 1970."""
    epoch: int
    seq: int
    pages_stored: int
    """Pages that the batch stores."""
    pages_removed: int


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a batch did."""

    what: str
    """`stored`, `removed`, `cleared`, `restarted`, `resync_began`, `resync_ended`, `before_gap`, `after_gap`,
    `doubted`, `first_batch`, `last_batch`, `last_page_stored` or `replaced` (it stored what took an evicted page's
    place)."""
    medium: str | None = None
    """Where the page was stored or removed."""
    batch: BatchPosition


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a prefix ends."""

    cause: Cause
    page: int | None = None
    """The first page that is missing, counted from 1. None: the cause concerns the whole worker."""
    tier: str | None = None
    """The slowest tier of the prefix that ends here: `gpu`, `cpu` or `disk`. None: all tiers."""
    group: str | None = None
    """The group that ends the prefix: `mamba`, `swa:WINDOW`, ..."""
    pages: int | None = None
    """Pages that are hidden, or that are held under the other namespace, or by the other worker."""
    worker: str | None = None
    """The other worker that holds most of the prompt."""
    request_id: str | None = None
    """The decision that sent the prompt to the other worker, or one whose pages took the place of an evicted one."""
    namespace: dict[str, str | int | bool | None] | None = None
    """What differs in the other namespace: `model`, `tenant`, `block_size`, `lora_name`, `cache_salt`, `seed` or
    `is_bigram`, with its value there. Empty: another adapter, salt or seed, which the log does not show."""
    evidence: list[Evidence] = []
    """In the order of the log."""
    text: str
    """The reason in a sentence."""


class WorkerExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why one rank of a worker holds no more of the prompt."""

    instance_id: str
    dp_rank: int
    model_name: str
    routing_group: str
    block_size: int
    """Tokens per page."""
    state: State | None = None
    """State of the view. None: the worker is not known yet."""
    state_reason: str = ""
    """Why the view cannot be fully trusted."""
    num_pages: int
    """Whole pages of the prompt."""
    held: dict[str, int]
    """Tier -> pages of the longest prefix held on this tier or a faster one, according to the view."""
    reusable: dict[str, int] = {}
    """Tier -> pages that the engine can reuse from this tier or a faster one: fewer than held if a group cuts them."""
    cause: Cause
    """Of the first finding."""
    findings: list[Finding]
    """The main reason first."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why each worker holds no more of a prompt."""

    model_name: str
    routing_group: str
    time: float
    """Time of the newest record that was applied, in seconds since 1970."""
    records: int
    """Records of the log that were applied."""
    num_tokens: int | None = None
    """None: the prompt was given as hashes."""
    workers: list[WorkerExplanation]
    """Those that hold most first."""
    damage: list[str] = []
    """Parts of the log that cannot be read, each with its file, byte and record. Their batches are missing above."""
