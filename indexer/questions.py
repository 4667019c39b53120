"""Queries of one prompt over several namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from indexer.scores import StreamScore, WorkerScore, stream_scores, worker_scores
from kv_events.hashing import U64Array


def score_all(
    namespaces: Iterable[Namespace],
    hashes: Callable[[int], U64Array],
    freshness: Freshness,
    num_positions: int | None = None,
) -> list[WorkerScore]:
    """Return one score for each worker, even if its ranks use different block sizes.

    hashes: block size -> uint64[pages], the prompt's sequence hashes. num_positions: see `indexer.reuse`.
    """
    return worker_scores(all_stream_scores(namespaces, hashes, freshness, num_positions))


def all_stream_scores(
    namespaces: Iterable[Namespace],
    hashes: Callable[[int], U64Array],
    freshness: Freshness,
    num_positions: int | None = None,
) -> list[StreamScore]:
    """Return the scores of the streams of all namespaces. See `score_all`."""
    return [
        stream
        for namespace in namespaces
        for stream in stream_scores(namespace, hashes(namespace.key.block_size), freshness, num_positions)
    ]
