"""Views that move forward are those that would have been opened."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from indexer.replay import LogIndexer, Timeline
from indexer.settings import IndexerSettings
from kv_events.log.batch_columns import decode_chunk
from kv_events.log.event_log import EventLogWriter
from kv_events.log.moments import LogMoment
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
    span = timeline.extent.span_s
    assert span is not None
    moving = timeline.at(LogMoment(index=1))
    assert num_plain(timeline) > 250
    for _ in range(150):
        near = moving.now + random.choice((0.0, 0.2, 3.0, 40.0))
        moment = random.choice(
            (
                LogMoment(index=min(timeline.next_index, moving.index + random.randrange(30))),
                LogMoment(time_s=near),
                LogMoment(time_s=random.uniform(*span) if random.random() < 0.2 else near),
                LogMoment(offsets=dict(moving.positions)) if random.random() < 0.1 else LogMoment(index=moving.index),
            )
        )
        can_move, before = timeline.can_move(moving, moment), moving
        moving = timeline.at(moment, before)
        ways["moved" if moving is before else "given up" if can_move else "opened"] += 1
        assert facts(moving) == facts(timeline.at(moment)), moment
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
    moving = timeline.at(LogMoment(index=5))
    for offset, agreed_at in ((5, 1004.5), (15, 1014.5), (18, 1017.5), (21, 1019.5)):
        assert timeline.at(LogMoment(index=offset), moving) is moving
        for views in (moving, timeline.at(LogMoment(index=offset))):
            assert [view.agreed_at for view in views.namespaces.views] == [agreed_at]


def test_views_do_not_move_back_or_far_beyond_key_frames(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path) as writer:
        for i in range(100):
            writer.append(Stream("w").batch(stored((0, [i + 1])), now=1000 + i))
    LogIndexer(tmp_path, SETTINGS, frame_cost=2000).advance()
    timeline = Timeline(tmp_path, SETTINGS)
    moving = timeline.at(LogMoment(index=50))
    for moment in (LogMoment(index=49), LogMoment(time_s=1048), LogMoment(index=100)):
        assert timeline.at(moment, moving) is not moving
    assert timeline.at(LogMoment(index=51), moving) is moving
    assert (moving.index, moving.now) == (51, 1050)
