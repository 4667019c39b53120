"""Views that move forward are those that would have been opened."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from indexer.replay import LogIndexer, MovingViews, Timeline
from indexer.replay.until import Until
from indexer.settings import IndexerSettings
from kv_events.log.batch_columns import decode_chunk
from kv_events.log.event_log import EventLogWriter
from tests.support.log.faulty_run import faulty_run
from tests.support.log.records import Stream, stored
from tests.support.log.view_facts import facts

SETTINGS = IndexerSettings(max_pages=2**12)


def write(folder: Path, *, seed: int, num_records: int) -> Timeline:
    """A log of a run with faults, in two partitions whose times are not in order."""
    with EventLogWriter(folder, segment_bytes=20_000) as writer:
        for record in faulty_run(Random(seed), num_records):
            writer.append(record)
    return Timeline(folder, SETTINGS)


@pytest.mark.parametrize("frame_cost", [None, 10_000])
def test_views_after_any_moves_are_those_of_the_moment(tmp_path: Path, frame_cost: int | None) -> None:
    timeline = write(tmp_path, seed=3, num_records=500)
    if frame_cost is not None:
        LogIndexer(tmp_path, SETTINGS, frame_cost=frame_cost).advance()
    random, ways = Random(5), Counter[str]()
    span = timeline.span_s
    assert span is not None
    moving = MovingViews(timeline, Until(offset=1))
    assert num_plain(timeline) > 250
    for _ in range(150):
        near = moving.views.now + random.choice((0.0, 0.2, 3.0, 40.0))
        moment = random.choice(
            (
                Until(offset=min(timeline.next_index, moving.index + random.randrange(30))),
                Until(time_s=near),
                Until(time_s=random.uniform(*span) if random.random() < 0.2 else near),
                Until(positions=dict(moving.views.positions)) if random.random() < 0.1 else Until(offset=moving.index),
            )
        )
        is_moved = moving.can_move(moment)
        if is_moved:
            is_moved = moving.move(moment)
            ways["moved" if is_moved else "given up"] += 1
        if not is_moved:
            moving = MovingViews(timeline, moment)
            ways["opened"] += 1
        assert facts(moving.views) == facts(timeline.at(moment)), moment
    assert ways["moved"] > 60, ways
    assert ways["opened"] > 5, ways


def num_plain(timeline: Timeline) -> int:
    """Return the number of batches that can be applied by the kernel."""
    return sum(
        int(np.count_nonzero(decode_chunk(chunk, 0, len(chunk.rows)).arrays.plain)) for chunk in timeline.chunks(0)
    )


def test_a_live_view_agreed_with_its_publisher_at_its_newest_batch(tmp_path: Path) -> None:
    stream = Stream("w")
    with EventLogWriter(tmp_path) as writer:
        for i in range(20):
            writer.append(stream.batch(stored((0, [i + 1])), now=1000.5 + i))
        writer.append(stream.batch(stored((0, [30])), digest=bytes(64), now=1020.5))
    timeline = Timeline(tmp_path, SETTINGS)
    assert num_plain(timeline) == 21
    moving = MovingViews(timeline, Until(offset=5))
    for offset, agreed_at in ((5, 1004.5), (15, 1014.5), (18, 1017.5), (21, 1019.5)):
        assert moving.move(Until(offset=offset))
        for views in (moving.views, timeline.at(Until(offset=offset))):
            assert [view.agreed_at for view in views.namespaces.views] == [agreed_at]


def test_views_do_not_move_back_or_far_beyond_key_frames(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path) as writer:
        for i in range(100):
            writer.append(Stream("w").batch(stored((0, [i + 1])), now=1000 + i))
    LogIndexer(tmp_path, SETTINGS, frame_cost=2000).advance()
    timeline = Timeline(tmp_path, SETTINGS)
    moving = MovingViews(timeline, Until(offset=50))
    assert moving.can_move(Until(offset=51))
    assert not moving.can_move(Until(offset=49))
    assert not moving.can_move(Until(time_s=1048))
    assert not moving.can_move(Until(offset=100))
    assert moving.move(Until(time_s=1050.5))
    assert (moving.index, moving.views.now) == (51, 1050.5)
