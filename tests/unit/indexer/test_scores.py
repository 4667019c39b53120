"""Scores that a router receives, computed from views."""

from __future__ import annotations

import numpy as np
import pytest

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.scores import TierTokens, WorkerScore, stream_scores, worker_scores
from indexer.settings import IndexerSettings
from indexer.views import ViewState
from tests.support.log.records import Stream, stored

PROMPT = np.arange(1, 8, dtype=np.uint64)


def scored(*batches: tuple[Stream, list[object]], now: float = 100.0) -> dict[str, WorkerScore]:
    applier = Applier(Namespaces(IndexerSettings(max_pages=1000)), DeadLetters())
    freshness = Freshness(10.0, 90.0)
    for stream, events in batches:
        for _ in applier.apply(stream.batch(*events, now=now), now):  # type: ignore[arg-type]
            pass
    for moment in np.arange(91.0, now + 1):
        freshness.note_log_read(moment)
    (namespace,) = applier.namespaces
    return {found.worker: found for found in worker_scores(stream_scores(namespace, PROMPT, freshness))}


def pages(*numbers: int, tier: int) -> object:
    return stored((0, list(numbers)), tier=tier)


@pytest.mark.parametrize(
    ("device", "host", "disk", "external", "expected"),
    [
        ((1, 2), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6), (7,), (8, 24, 24, 28)),
        ((1,), (3,), (2,), (), (4, 4, 12, 12)),
        ((3,), (1, 2), (), (), (0, 12, 12, 12)),
        ((), (), (1,), (), (0, 0, 4, 4)),
        ((2, 3), (), (), (), None),
    ],
)
def test_each_tier_counts_what_it_or_a_faster_one_holds(
    device: tuple[int, ...],
    host: tuple[int, ...],
    disk: tuple[int, ...],
    external: tuple[int, ...],
    expected: tuple[int, int, int, int] | None,
) -> None:
    held = [pages(*each, tier=tier) for tier, each in enumerate((device, host, disk, external)) if each]
    found = scored((Stream("w"), held))
    assert found.get("w", None) is None if expected is None else found["w"].tiers == TierTokens(*expected)


def test_a_worker_is_as_good_as_its_best_rank_on_each_tier() -> None:
    found = scored(
        (Stream("w", dp_rank=0), [pages(1, 2, tier=0)]),
        (Stream("w", dp_rank=1), [pages(1, tier=0), pages(2, 3, tier=1)]),
    )["w"]
    assert found.tiers == TierTokens(8, 12, 12, 12)
    assert found.ranks == {0: TierTokens(8, 8, 8, 8), 1: TierTokens(4, 12, 12, 12)}
    assert found.longest_matched == 12


def test_a_worker_is_as_trustworthy_as_its_worst_rank() -> None:
    lost = Stream("w", dp_rank=1)
    lost.batch(pages(9, tier=0))  # type: ignore[arg-type]
    found = scored((Stream("w"), [pages(1, tier=0)]), (lost, [pages(1, tier=0)]))["w"]
    assert found.state is ViewState.STALE


def test_expired_workers_are_left_out() -> None:
    applier = Applier(Namespaces(IndexerSettings(max_pages=1000)), DeadLetters())
    for worker, now in (("old", 100.0), ("new", 120.0)):
        for _ in applier.apply(Stream(worker).batch(pages(1, tier=0), now=now), now):  # type: ignore[arg-type]
            pass
    freshness = Freshness(10.0, 100.0)
    for moment in np.arange(100.0, 121.0):
        freshness.note_log_read(moment)
    (namespace,) = applier.namespaces
    assert [found.worker for found in worker_scores(stream_scores(namespace, PROMPT, freshness))] == ["new"]


def test_weights_give_one_number() -> None:
    found = scored((Stream("w"), [pages(1, 2, tier=0), pages(3, tier=1), pages(4, tier=3)]))["w"]
    assert found.tiers.weighted([1.0, 0.5, 0.25, 0.1]) == pytest.approx(8 + 0.5 * 4 + 0.1 * 4)
