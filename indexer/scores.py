"""From holder sets to what a router wants to know: tokens of a prompt held by every worker, per cumulative tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from indexer.reuse import reusable_pages
from indexer.views import View, ViewState
from kv_events.hashing import U64Array

_TRUST = {ViewState.LIVE: 0, ViewState.SYNCING: 1, ViewState.STALE: 2}


class TierTokens(NamedTuple):
    """Tokens of a prompt's longest prefix held on a tier or a faster one: gpu <= cpu <= disk <= external."""

    gpu: int
    cpu: int
    disk: int
    external: int


class WorkerScore(NamedTuple):
    """What one worker holds of a prompt."""

    worker: str
    tiers: TierTokens
    """Best over the worker's ranks, tier by tier."""
    ranks: dict[int, TierTokens]
    """By DP rank."""
    state: ViewState
    """The least trustworthy state among the ranks that count."""
    heard_at: float
    """Seconds since 1970: when the oldest of these views was last confirmed by a batch."""
    reusable_by_rank: dict[int, int] | None = None
    """Tokens by DP rank, see `reusable`; None: no rank has group streams."""

    @property
    def has_groups(self) -> bool:
        """Whether the worker says where its states and windows are."""
        return self.reusable_by_rank is not None

    @property
    def reusable(self) -> int:
        """Tokens that the engine can go on from, which with states or windows are fewer than are matched; best rank."""
        return self.longest_matched if self.reusable_by_rank is None else max(self.reusable_by_rank.values())

    @property
    def longest_matched(self) -> int:
        """Tokens held on any tier."""
        return self.tiers.external

    def weighted(self, weights: Sequence[float]) -> float:
        """One number: tokens, each weighed by the fastest tier that reaches it. weights: 4, fastest tier first."""
        total, reached = 0.0, 0
        for tokens, weight in zip(self.tiers, weights, strict=True):
            total += (tokens - reached) * weight
            reached = tokens
        return total


def score(namespace: Namespace, hashes: U64Array, freshness: Freshness) -> list[WorkerScore]:
    """Every worker that holds the prompt's first page on any tier; expired workers are left out.

    hashes: uint64[n], C order, sequence hashes of the prompt's whole pages.
    """
    matches = namespace.index.find(hashes)
    block_size = namespace.key.block_size
    rows = matches.pages[matches.streams].tolist()
    by_worker: dict[str, list[tuple[View, TierTokens]]] = {}
    for stream, row in zip(matches.streams.tolist(), rows, strict=True):
        view = namespace.views[stream]
        if freshness.state(view) is not ViewState.EXPIRED:
            tokens = TierTokens(*[pages * block_size for pages in row])
            by_worker.setdefault(view.stream.worker, []).append((view, tokens))
    scores = [_worker_score(worker, ranks) for worker, ranks in by_worker.items()]
    if namespace.groups:
        reusable = reusable_pages(namespace, hashes, matches, freshness)
        return [_with_reusable(each, reusable, block_size) for each in scores]
    return scores


def _with_reusable(score: WorkerScore, pages: dict[tuple[str, int], int], block_size: int) -> WorkerScore:
    """pages: by worker and rank, of those that have group streams."""
    if not any((score.worker, rank) in pages for rank in score.ranks):
        return score
    by_rank = {
        rank: pages[score.worker, rank] * block_size if (score.worker, rank) in pages else tiers.external
        for rank, tiers in score.ranks.items()
    }
    return score._replace(reusable_by_rank=by_rank)


def _worker_score(worker: str, ranks: list[tuple[View, TierTokens]]) -> WorkerScore:
    if len(ranks) == 1:
        view, tokens = ranks[0]
        return WorkerScore(worker, tokens, {view.stream.dp_rank: tokens}, view.state, view.heard_at)
    views = [view for view, _ in ranks]
    return WorkerScore(
        worker,
        TierTokens(*(max(column) for column in zip(*(tokens for _, tokens in ranks), strict=True))),
        {view.stream.dp_rank: tokens for view, tokens in ranks},
        max((view.state for view in views), key=_TRUST.__getitem__),
        min(view.heard_at for view in views),
    )
