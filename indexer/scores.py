"""Scores: the tokens of a prompt that each worker holds, by cumulative tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from indexer.reuse import NO_GROUPS, reusable_pages
from indexer.views import ViewState, least_trusted
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


class StreamScore(NamedTuple):
    """The part of a prompt that one DP rank holds."""

    worker: str
    dp_rank: int
    tiers: TierTokens
    state: ViewState
    """The state to show."""
    heard_at: float
    """See `View.heard_at`."""
    partition: int
    """See `View.partition`."""
    reusable: int | None = None
    """Tokens from which the engine can continue. None: the rank has no group streams."""


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
    return worker_scores(stream_scores(namespace, hashes, freshness))


def stream_scores(namespace: Namespace, hashes: U64Array, freshness: Freshness) -> list[StreamScore]:
    """Return the scores of all streams that hold the prompt's first page on any tier, except expired ones."""
    matches = namespace.index.find(hashes)
    block_size = namespace.key.block_size
    rows = matches.pages[matches.streams].tolist()
    streams = matches.streams.tolist()
    reusable: dict[int, int] = {}
    if namespace.groups:
        pages = reusable_pages(namespace, hashes, matches, freshness)
        counts = zip(streams, pages[matches.streams].tolist(), strict=True)
        reusable = {stream: count * block_size for stream, count in counts if count != NO_GROUPS}
    scores = []
    for number, row in zip(streams, rows, strict=True):
        view = namespace.views[number]
        state = freshness.state(view)
        if state is not ViewState.EXPIRED:
            tokens = TierTokens(*[pages * block_size for pages in row])
            stream = view.stream
            scores.append(
                StreamScore(
                    stream.worker, stream.dp_rank, tokens, state, view.heard_at, view.partition, reusable.get(number)
                )
            )
    return scores


def worker_scores(streams: Iterable[StreamScore]) -> list[WorkerScore]:
    """Return one score for each worker of some streams, whatever their block sizes are."""
    by_worker: dict[str, list[StreamScore]] = {}
    for stream in streams:
        by_worker.setdefault(stream.worker, []).append(stream)
    return [_worker_score(worker, ranks) for worker, ranks in by_worker.items()]


def _worker_score(worker: str, ranks: list[StreamScore]) -> WorkerScore:
    if len(ranks) == 1:
        (only,) = ranks
        reusable = None if only.reusable is None else {only.dp_rank: only.reusable}
        return WorkerScore(worker, only.tiers, {only.dp_rank: only.tiers}, only.state, only.heard_at, reusable)
    return WorkerScore(
        worker,
        TierTokens(*(max(column) for column in zip(*(each.tiers for each in ranks), strict=True))),
        {each.dp_rank: each.tiers for each in ranks},
        least_trusted(each.state for each in ranks),
        min(each.heard_at for each in ranks),
        _reusable_by_rank(ranks),
    )


def _reusable_by_rank(ranks: list[StreamScore]) -> dict[int, int] | None:
    if all(each.reusable is None for each in ranks):
        return None
    return {each.dp_rank: each.tiers.external if each.reusable is None else each.reusable for each in ranks}
