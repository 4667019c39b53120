"""Scores: the tokens of a prompt that each worker holds, by cumulative tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from indexer.reuse import NO_GROUPS, reusable_pages
from indexer.views import View, ViewState, least_trusted
from kv_events.hashing import U64Array


class TierTokens(NamedTuple):
    """Tokens of a prompt's longest prefix held on a tier or a faster one: gpu <= cpu <= disk <= external."""

    gpu: int
    cpu: int
    disk: int
    external: int

    def weighted(self, weights: Sequence[float]) -> float:
        """Return the tokens, each weighted by the fastest tier that reaches it. weights: 4, fastest tier first."""
        gpu, cpu, disk, external = weights
        return (
            self.gpu * gpu
            + (self.cpu - self.gpu) * cpu
            + (self.disk - self.cpu) * disk
            + (self.external - self.disk) * external
        )


_Rank = tuple[View, ViewState, TierTokens]
"""state: the state to show."""


class WorkerScore(NamedTuple):
    """The part of a prompt that one worker holds."""

    worker: str
    tiers: TierTokens
    """Best over the worker's ranks, tier by tier."""
    ranks: dict[int, TierTokens]
    """Tokens by DP rank."""
    state: ViewState
    """The least trustworthy state among the ranks that count."""
    heard_at: float
    """The oldest `View.heard_at` among the ranks."""
    reusable_by_rank: dict[int, int] | None = None
    """Tokens by DP rank, see `reusable`. None if no rank has group streams."""

    @property
    def has_groups(self) -> bool:
        """Whether the worker publishes its recurrent states and sliding windows."""
        return self.reusable_by_rank is not None

    @property
    def reusable(self) -> int:
        """Tokens from which the engine can continue, for the best rank. With groups, they may be fewer than matched."""
        return self.longest_matched if self.reusable_by_rank is None else max(self.reusable_by_rank.values())

    @property
    def longest_matched(self) -> int:
        """Tokens held on any tier."""
        return self.tiers.external


def score(namespace: Namespace, hashes: U64Array, freshness: Freshness) -> list[WorkerScore]:
    """Return the scores of all workers that hold the prompt's first page on any tier, except expired ones.

    hashes: uint64[n], C order, sequence hashes of the prompt's complete pages.
    """
    matches = namespace.index.find(hashes)
    block_size = namespace.key.block_size
    rows = matches.pages[matches.streams].tolist()
    by_worker: dict[str, list[_Rank]] = {}
    for stream, row in zip(matches.streams.tolist(), rows, strict=True):
        view = namespace.views[stream]
        state = freshness.state(view)
        if state is not ViewState.EXPIRED:
            tokens = TierTokens(*[pages * block_size for pages in row])
            by_worker.setdefault(view.stream.worker, []).append((view, state, tokens))
    scores = [_worker_score(worker, ranks) for worker, ranks in by_worker.items()]
    if namespace.groups:
        pages = reusable_pages(namespace, hashes, matches, freshness)
        found = [(namespace.views[stream].stream, int(pages[stream])) for stream in matches.streams.tolist()]
        reusable = {(stream.worker, stream.dp_rank): count for stream, count in found if count != NO_GROUPS}
        return [_with_reusable(each, reusable, block_size) for each in scores]
    return scores


def _with_reusable(score: WorkerScore, pages: dict[tuple[str, int], int], block_size: int) -> WorkerScore:
    """pages: reusable pages by worker and rank, for those with group streams."""
    if not any((score.worker, rank) in pages for rank in score.ranks):
        return score
    by_rank = {
        rank: pages[score.worker, rank] * block_size if (score.worker, rank) in pages else tiers.external
        for rank, tiers in score.ranks.items()
    }
    return score._replace(reusable_by_rank=by_rank)


def _worker_score(worker: str, ranks: list[_Rank]) -> WorkerScore:
    if len(ranks) == 1:
        view, state, tokens = ranks[0]
        return WorkerScore(worker, tokens, {view.stream.dp_rank: tokens}, state, view.heard_at)
    return WorkerScore(
        worker,
        TierTokens(*(max(column) for column in zip(*(tokens for _, _, tokens in ranks), strict=True))),
        {view.stream.dp_rank: tokens for view, _, tokens in ranks},
        least_trusted(state for _, state, _ in ranks),
        min(view.heard_at for view, _, _ in ranks),
    )
