"""Queries of one prompt over several namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from indexer.scores import TierTokens, WorkerScore, score
from indexer.views import least_trusted
from kv_events.hashing import U64Array


def score_all(
    namespaces: Iterable[Namespace], hashes: Callable[[int], U64Array], freshness: Freshness
) -> list[WorkerScore]:
    """Return one score for each worker, even if its ranks use different block sizes.

    hashes: block size -> uint64[pages], the prompt's sequence hashes.
    """
    by_worker: dict[str, WorkerScore] = {}
    for namespace in namespaces:
        for new in score(namespace, hashes(namespace.key.block_size), freshness):
            old = by_worker.get(new.worker)
            by_worker[new.worker] = new if old is None else _sum_up(old, new)
    return list(by_worker.values())


def _sum_up(a: WorkerScore, b: WorkerScore) -> WorkerScore:
    return WorkerScore(
        a.worker,
        TierTokens(*map(max, a.tiers, b.tiers)),
        a.ranks | b.ranks,
        least_trusted((a.state, b.state)),
        min(a.heard_at, b.heard_at),
        _reusable_by_rank(a) | _reusable_by_rank(b) if a.has_groups or b.has_groups else None,
    )


def _reusable_by_rank(score: WorkerScore) -> dict[int, int]:
    if score.reusable_by_rank is not None:
        return score.reusable_by_rank
    return {rank: tiers.external for rank, tiers in score.ranks.items()}
