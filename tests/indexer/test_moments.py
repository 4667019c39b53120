"""Any moment of a log, compared with a replay of everything from its beginning."""

from collections import Counter
from pathlib import Path
from random import Random
from shutil import copytree
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.replay import LogIndexer, Replay, Timeline
from indexer.settings import IndexerSettings
from kv_events.log.event_log import EventLogReader, EventLogWriter
from kv_events.log.moments import LogMoment
from kv_events.log.reader import decode_chunk
from kv_events.records import Channel, LogRecord
from tests.support.effort import num_examples
from tests.support.log.faulty_run import faulty_run
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, stored
from tests.support.log.view_facts import facts

SETTINGS = IndexerSettings(max_pages=1000)
SEEDS, LENGTHS = st.integers(0, 2**32), st.integers(1, 120)


def write(folder: Path, random: Random, length: int) -> list[LogRecord]:
    """Write a faulty run, with key frames in some places. Returns its records."""
    records = faulty_run(random, length)
    done = random.randrange(len(records) + 1)
    for part in (records[:done], records[done:]):
        write_log(folder, part, random.choice((1, 4000, 50_000)))
        if random.random() < 0.7:
            LogIndexer(folder, SETTINGS, frame_cost=random.choice((0, 500, 5000, 10**9))).advance()
    for frame in folder.glob("*.kvframe"):
        if random.random() < 0.2:
            frame.unlink()
    return records


def from_the_beginning(folder: Path, until: LogMoment, bounds: IndexerSettings = SETTINGS) -> Replay:
    found = (
        record._replace(offset=index) if until.index is not None else record
        for index, record in EventLogReader(folder).read()
    )
    return Replay(bounds).apply_all(found, until)


def some_moment(random: Random, records: list[LogRecord]) -> LogMoment:
    kind, record = random.random(), random.choice(records)
    if kind < 0.4:
        return LogMoment(index=random.randrange(len(records) + 2))
    if kind < 0.7:
        return LogMoment(time_s=(record.timestamp_ms + random.choice((-1, 0, 1, 4000))) / 1000)
    limits = {0: -1, 1: -1}
    for each in records[: random.randrange(len(records) + 1)]:
        if each.channel == Channel.EVENTS:
            limits[each.partition] = each.offset
    return LogMoment(offsets={p: offset + random.randrange(2) for p, offset in limits.items() if offset >= 0})


@given(SEEDS, LENGTHS)
@settings(max_examples=num_examples(12), deadline=None)
def test_any_moment_equals_a_replay_from_the_beginning(seed: int, length: int) -> None:
    random = Random(seed)
    with TemporaryDirectory() as name:
        records = write(Path(name), random, length)
        timeline = Timeline(Path(name), SETTINGS)
        for _ in range(6):
            moment = some_moment(random, records)
            assert facts(timeline.at(moment)) == facts(from_the_beginning(Path(name), moment)), moment
        assert (timeline.faults, timeline.damage) == ([], [])


@given(SEEDS, st.integers(20, 120))
@settings(max_examples=num_examples(12), deadline=None)
def test_a_log_whose_oldest_files_are_deleted_opens_as_the_whole_one(seed: int, length: int) -> None:
    random = Random(seed)
    with TemporaryDirectory() as name, TemporaryDirectory() as whole:
        folder, records = Path(name), faulty_run(random, length)
        indexer = None
        with EventLogWriter(folder, segment_bytes=random.choice((1, 4000, 20_000))) as writer:
            for record in records:
                writer.append(record)
                if random.random() < 0.2:
                    writer.flush(sync=False)
                    indexer = indexer or LogIndexer(folder, SETTINGS, frame_cost=random.choice((500, 10**9)))
                    indexer.advance()
        LogIndexer(folder, SETTINGS).advance()
        copytree(folder, whole, dirs_exist_ok=True)
        segments = sorted(folder.glob("*.kvlog"))
        for path in segments[: random.randrange(len(segments))]:
            path.unlink()
        timeline = Timeline(folder, SETTINGS)
        for _ in range(4):
            moment = LogMoment(index=random.randrange(timeline.first_index, len(records) + 1))
            assert facts(timeline.at(moment)) == facts(from_the_beginning(Path(whole), moment)), moment
        assert (timeline.faults, timeline.damage, timeline.warnings) == ([], [], [])


@given(SEEDS, LENGTHS)
@settings(max_examples=num_examples(12), deadline=None)
def test_steps_forward_and_back_equal_a_replay_from_the_beginning(seed: int, length: int) -> None:
    random = Random(seed)
    with TemporaryDirectory() as name:
        records = write(Path(name), random, length)
        timeline = Timeline(Path(name), SETTINGS)
        events = [index for index, record in enumerate(records) if record.channel == Channel.EVENTS]
        timeline.at(some_moment(random, records))
        for _ in range(8):
            before = timeline.index
            if random.random() < 0.5:
                views, at = timeline.next(), min((i + 1 for i in events if i >= before), default=None)
            else:
                views, at = timeline.previous(), max((i for i in events if i < before), default=None)
            assert (views is None) == (at is None)
            if views is not None and at is not None:
                assert timeline.index == at
                assert facts(views) == facts(from_the_beginning(Path(name), LogMoment(index=at)))


@pytest.mark.parametrize("frame_at", [None, 19, 21])
@pytest.mark.parametrize("late_s", [0.0, 8.0])
@pytest.mark.parametrize(("first_clock_s", "second_clock_s"), [(0, 0), (0, -7), (0, 7), (2, 0), (-3600, -3600)])
def test_late_batches_and_wrong_clocks_replay_equally_however_they_are_read(
    tmp_path: Path, frame_at: int | None, late_s: float, first_clock_s: int, second_clock_s: int
) -> None:
    stream = Stream()
    with EventLogWriter(tmp_path) as writer:
        for second in range(45):
            clock_s = first_clock_s if second < 20 else second_clock_s
            record = stream.batch(stored((0, [second + 1])), now=100_000.0 + second + clock_s)
            late_ms = 1000 * late_s if 10 <= second < 30 else 0
            writer.append(record._replace(timestamp_ms=round(1000 * (100_000 + second) + late_ms)))
            if second == frame_at:
                writer.flush(sync=False)
                LogIndexer(tmp_path, SETTINGS, frame_cost=0).advance()
    timeline = Timeline(tmp_path, SETTINGS)
    for offset in range(5, 45):
        moment = LogMoment(index=offset)
        assert facts(timeline.at(moment)) == facts(from_the_beginning(tmp_path, moment)), moment


@given(SEEDS)
@settings(max_examples=num_examples(8), deadline=None)
def test_workers_are_dropped_as_in_a_replay_from_the_beginning(seed: int) -> None:
    random = Random(seed)
    bounds = IndexerSettings(max_pages=1000, forget_after_s=20)
    streams = [Stream(f"w-{number}", model=f"m-{number % 2}") for number in range(4)]
    until = [random.randrange(100) for _ in streams]
    with TemporaryDirectory() as name:
        with EventLogWriter(Path(name), segment_bytes=4000) as writer:
            for second in range(100):
                for number, stream in enumerate(streams):
                    if second < until[number] or second > until[number] + 40:
                        writer.append(stream.batch(stored((0, [100 * second + number])), now=1000.0 + second))
                writer.append(LogRecord(0, 0, 10**7, b"router", b"anything", Channel.DECISIONS))
        LogIndexer(Path(name), bounds, frame_cost=random.choice((500, 10**9))).advance()
        timeline = Timeline(Path(name), bounds)
        end = timeline.next_index
        for moment in (
            LogMoment(index=random.randrange(end)),
            LogMoment(time_s=1000 + random.randrange(100)),
            LogMoment(),
        ):
            assert facts(timeline.at(moment)) == facts(from_the_beginning(Path(name), moment, bounds)), moment


@pytest.mark.parametrize("frame_cost", [None, 10_000])
def test_views_after_any_moves_are_those_of_the_moment(tmp_path: Path, frame_cost: int | None) -> None:
    write_log(tmp_path, faulty_run(Random(3), 500), 20_000)
    timeline = Timeline(tmp_path, SETTINGS)
    if frame_cost is not None:
        LogIndexer(tmp_path, SETTINGS, frame_cost=frame_cost).advance()
    random, ways = Random(5), Counter[str]()
    span = timeline.extent.span_s
    assert span is not None
    moving = timeline.at(LogMoment(index=1))
    assert num_plain(timeline) > 250
    for _ in range(100):
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
    assert ways["moved"] > 40, ways
    assert ways["opened"] > 3, ways


def num_plain(timeline: Timeline) -> int:
    """Return the number of batches that can be applied by the kernel."""
    return sum(
        int(np.count_nonzero(decode_chunk(chunk, 0, len(chunk.rows)).arrays.plain)) for chunk in timeline.chunks(0)
    )


def test_a_live_view_agreed_with_its_publisher_at_its_newest_batch(tmp_path: Path) -> None:
    stream = Stream("w")
    records = [stream.batch(stored((0, [i + 1])), now=1000.5 + i) for i in range(20)]
    write_log(tmp_path, [*records, stream.batch(stored((0, [30])), digest=bytes(64), now=1020.5)])
    timeline = Timeline(tmp_path, SETTINGS)
    assert num_plain(timeline) == 21
    moving = timeline.at(LogMoment(index=5))
    for offset, agreed_at in ((5, 1004.5), (15, 1014.5), (18, 1017.5), (21, 1019.5)):
        assert timeline.at(LogMoment(index=offset), moving) is moving
        for views in (moving, timeline.at(LogMoment(index=offset))):
            assert [view.agreed_at for view in views.namespaces.views] == [agreed_at]


def test_views_do_not_move_back_or_far_beyond_key_frames(tmp_path: Path) -> None:
    write_log(tmp_path, (Stream("w").batch(stored((0, [i + 1])), now=1000 + i) for i in range(100)))
    LogIndexer(tmp_path, SETTINGS, frame_cost=2000).advance()
    timeline = Timeline(tmp_path, SETTINGS)
    moving = timeline.at(LogMoment(index=50))
    for moment in (LogMoment(index=49), LogMoment(time_s=1048), LogMoment(index=100)):
        assert timeline.at(moment, moving) is not moving
    assert timeline.at(LogMoment(index=51), moving) is moving
    assert (moving.index, moving.now) == (51, 1050)
