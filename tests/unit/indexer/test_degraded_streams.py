"""Views of streams whose publishers report that they may be incomplete."""

from __future__ import annotations

import numpy as np
import pytest

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.resync import ResyncPlanner
from indexer.scores import stream_scores
from indexer.settings import IndexerSettings
from indexer.snapshots.image import take, unpack
from indexer.views import View, ViewState
from kv_events.records import LogRecord
from kv_events.schema import BATCHES_LOST, ENGINE_UNHEARD
from tests.support.log.records import Stream, stored

SETTINGS = IndexerSettings(max_pages=10_000)
PAGE_1 = np.array([1], np.uint64)


class Reader:
    """Applies records at their own times."""

    def __init__(self) -> None:
        self.applier = Applier(Namespaces(SETTINGS), DeadLetters())
        self.freshness = Freshness(ttl_s=10.0, now=100.0)
        self._planner = ResyncPlanner(SETTINGS, self.freshness, seed=1)

    def read(self, *records: LogRecord) -> None:
        for record in records:
            for _ in self.applier.apply(record, record.timestamp_ms / 1000):
                pass
            self.freshness.note_log_read(record.timestamp_ms / 1000)

    def view(self, stream: Stream) -> View:
        view = self.applier.namespaces.view(stream.id)
        assert view is not None
        return view

    def shown(self, stream: Stream) -> tuple[ViewState, str]:
        view = self.view(stream)
        return self.freshness.state(view), view.reason

    def asks_for_resyncs(self) -> bool:
        return any(self._planner.plan(self.applier.namespaces, now) for now in (1.0, 2.0, 3.0))


@pytest.fixture
def reader() -> Reader:
    return Reader()


def test_a_degraded_view_is_stale_with_the_reason_and_no_resync_until_it_recovers(reader: Reader) -> None:
    stream = Stream()
    reader.read(stream.batch(stored((0, [1])), now=100.0), stream.batch(now=101.0, degraded_reason=BATCHES_LOST))
    assert reader.shown(stream) == (ViewState.STALE, BATCHES_LOST)
    assert not reader.asks_for_resyncs()
    reader.read(stream.batch(stored((0, [2])), now=102.0, degraded_reason=BATCHES_LOST))
    assert reader.shown(stream) == (ViewState.STALE, BATCHES_LOST)
    reader.read(stream.batch(now=103.0))
    assert reader.shown(stream) == (ViewState.LIVE, "")


def test_a_gap_in_a_degraded_stream_is_repaired(reader: Reader) -> None:
    stream = Stream()
    reader.read(stream.batch(stored((0, [1])), now=100.0, degraded_reason=BATCHES_LOST))
    stream.batch(stored((0, [2])))  # lost
    reader.read(stream.batch(now=101.0, degraded_reason=BATCHES_LOST))
    assert reader.shown(stream) == (ViewState.STALE, "gap")
    assert reader.asks_for_resyncs()
    reader.read(stream.resync(now=102.0))
    assert reader.shown(stream) == (ViewState.LIVE, "")


def test_a_degraded_worker_stays_in_the_scores_as_stale(reader: Reader) -> None:
    degraded, sound = Stream("degraded"), Stream("sound")
    page = stored((0, [1]))
    reader.read(degraded.batch(page, now=100.0, degraded_reason=BATCHES_LOST), sound.batch(page, now=100.0))
    second_rank = Stream("sound", dp_rank=1)
    reader.read(second_rank.batch(page, now=100.0, degraded_reason=BATCHES_LOST))
    (namespace,) = reader.applier.namespaces
    scores = stream_scores(namespace, PAGE_1, reader.freshness)
    assert {each.worker: (each.tiers.gpu, each.state) for each in scores} == {
        "degraded": (4, ViewState.STALE),
        "sound": (4, ViewState.STALE),
    }
    reader.read(second_rank.batch(now=101.0))
    scores = stream_scores(namespace, PAGE_1, reader.freshness)
    assert {each.worker: each.state for each in scores} == {"degraded": ViewState.STALE, "sound": ViewState.LIVE}


def test_a_view_ages_while_the_engine_is_not_heard_and_does_not_expire(reader: Reader) -> None:
    stream = Stream()
    reader.read(stream.batch(stored((0, [1])), now=100.0))
    reader.read(*(stream.batch(now=100.0 + 5 * beat, degraded_reason=ENGINE_UNHEARD) for beat in range(1, 8)))
    assert reader.view(stream).last_batch_at == 100.0
    assert reader.shown(stream) == (ViewState.STALE, ENGINE_UNHEARD)
    reader.read(stream.batch(now=136.0, degraded_reason=BATCHES_LOST))
    assert reader.view(stream).last_batch_at == 136.0


def test_a_view_whose_engine_was_never_heard_is_as_old_as_its_stream(reader: Reader) -> None:
    stream = Stream()
    reader.read(
        stream.batch(now=100.0, degraded_reason=ENGINE_UNHEARD), stream.batch(now=105.0, degraded_reason=ENGINE_UNHEARD)
    )
    assert reader.view(stream).last_batch_at == 100.0


def test_a_publisher_that_is_silent_expires_whatever_its_degraded_reason(reader: Reader) -> None:
    stream = Stream()
    reader.read(stream.batch(now=100.0, degraded_reason=ENGINE_UNHEARD))
    for now in range(102, 113, 2):
        reader.freshness.note_log_read(now)
    assert reader.shown(stream)[0] is ViewState.EXPIRED


def test_degraded_reasons_outlive_the_indexer(reader: Reader) -> None:
    stream = Stream()
    reader.read(stream.batch(stored((0, [1])), now=100.0, degraded_reason=BATCHES_LOST))
    copying = take(reader.applier.namespaces, {}, 100.0)
    try:
        while True:
            next(copying)
    except StopIteration as end:
        reader.applier.namespaces = unpack(b"".join(end.value.pack()), SETTINGS).namespaces
    assert reader.shown(stream) == (ViewState.STALE, BATCHES_LOST)
    assert not reader.asks_for_resyncs()
