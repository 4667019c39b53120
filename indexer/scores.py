"""Scores: the tokens of a prompt that each worker can reuse, by cumulative tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from indexer.reuse import reusable
from indexer.views import STATES, ViewState, least_trusted
from kv_events.hashing import U64Array


class TierTokens(NamedTuple):
    """Tokens of a prompt's longest reusable prefix on a tier or a faster one: gpu <= cpu <= disk <= external."""

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
    """The part of a prompt that one DP rank can reuse."""

    worker: str
    dp_rank: int
    tiers: TierTokens
    state: ViewState
    """The state to show."""
    heard_at: float
    """See `View.heard_at`."""
    partition: int
    """See `View.partition`."""


class WorkerScore(NamedTuple):
    """The part of a prompt that one worker can reuse."""

    worker: str
    tiers: TierTokens
    """Best over the worker's ranks, tier by tier."""
    ranks: dict[int, TierTokens]
    """Tokens by DP rank."""
    state: ViewState
    """The least trustworthy state among the ranks that count."""
    heard_at: float
    """The oldest `View.heard_at` among the ranks."""

    @property
    def longest_matched(self) -> int:
        """Tokens that can be reused from any tier."""
        return self.tiers.external


def score(
    namespace: Namespace, hashes: U64Array, freshness: Freshness, num_positions: int | None = None
) -> list[WorkerScore]:
    """Return the scores of all workers that can reuse a page of the prompt from any tier, except expired ones.

    hashes: uint64[n], C order, sequence hashes of the prompt's complete pages. num_positions: see `indexer.reuse`.
    """
    return worker_scores(stream_scores(namespace, hashes, freshness, num_positions))


def stream_scores(
    namespace: Namespace, hashes: U64Array, freshness: Freshness, num_positions: int | None = None
) -> list[StreamScore]:
    """Return the scores of all streams that can reuse a page of the prompt from any tier, except expired ones."""
    matches = namespace.index.find(hashes)
    group_states = None
    if namespace.groups:
        matches, group_states = reusable(namespace, hashes, matches, freshness, num_positions)
    block_size = namespace.key.block_size
    rows = matches.pages[matches.streams].tolist()
    scores = []
    for number, row in zip(matches.streams.tolist(), rows, strict=True):
        view = namespace.views[number]
        state = freshness.state(view)
        if group_states is not None:
            state = least_trusted((state, STATES[group_states[number]]))
        if state is not ViewState.EXPIRED:
            tokens = TierTokens(*[pages * block_size for pages in row])
            stream = view.stream
            scores.append(StreamScore(stream.worker, stream.dp_rank, tokens, state, view.heard_at, view.partition))
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
        return WorkerScore(worker, only.tiers, {only.dp_rank: only.tiers}, only.state, only.heard_at)
    return WorkerScore(
        worker,
        TierTokens(*(max(column) for column in zip(*(each.tiers for each in ranks), strict=True))),
        {each.dp_rank: each.tiers for each in ranks},
        least_trusted(each.state for each in ranks),
        min(each.heard_at for each in ranks),
    )
