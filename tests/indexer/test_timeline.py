"""Moments of a log: key frames, what replaces them, and what cannot be read."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.audit.audit import audit_log
from indexer.replay import LogIndexer, Timeline, open_beginning
from indexer.settings import IndexerSettings
from indexer.views import ViewState
from kv_events.codec import StoredPages
from kv_events.log.event_log import EventLogError, EventLogWriter, LogRetention
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from tests.support.log.late_log import write_log
from tests.support.log.plain_log import flip
from tests.support.log.records import Stream, removed, stored
from tests.support.log.view_facts import facts

SETTINGS = IndexerSettings(max_pages=1000)
NUM_RECORDS = 60


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of two workers in several segments. Record i is of second i and stores page i + 1."""
    streams = [Stream("w-0"), Stream("w-1")]
    records = (streams[i % 2].batch(stored((0, [i + 1])), now=1000 + i) for i in range(NUM_RECORDS))
    return write_log(tmp_path / "log", records, 5000)


def index_log(folder: Path, frame_cost: int = 1500) -> list[Path]:
    LogIndexer(folder, SETTINGS, frame_cost=frame_cost).advance()
    return frames(folder)


def frames(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kvframe"))


def num_pages(timeline: Timeline, moment: LogMoment | None = None) -> int:
    return sum(view.num_pages[0] for view in timeline.at(moment).namespaces.views)


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_an_indexer_continues_where_another_one_ended(log: Path) -> None:
    before = index_log(log)
    write_log(log, (Stream("w-2").batch(stored((0, [100 + i])), now=2000) for i in range(30)))
    indexer = LogIndexer(log, SETTINGS, frame_cost=1500)
    assert indexer.next_index > NUM_RECORDS / 2
    indexer.advance()
    assert indexer.next_index == NUM_RECORDS + 30
    assert len(frames(log)) == len(before) + indexer.frames_written > len(before)


@pytest.mark.parametrize("years", [50, 200_000_000])
def test_a_pause_of_any_length_is_opened_at_once(tmp_path: Path, years: int) -> None:
    stream, other = Stream("w-0"), Stream("w-1")
    end = 1000.0 + years * 365 * 86_400
    write_log(tmp_path, [stream.batch(stored((0, [1])), now=1000.0), other.batch(stored((0, [2])), now=end)])
    middle = LogMoment(time_s=end / 2)
    timeline = Timeline(tmp_path, SETTINGS)
    moving = timeline.at(LogMoment(index=1))
    assert timeline.at(middle, moving) is moving
    for views in (timeline.at(middle), moving):
        assert (views.now, views.freshness.log_read_at) == (end / 2, end / 2)
        assert [views.freshness.state(view) for view in views.namespaces.views] == [ViewState.EXPIRED]


def test_a_damaged_key_frame_is_named_and_an_earlier_one_is_used(log: Path) -> None:
    expected = facts(Timeline(log, SETTINGS).at())
    *_, last = index_log(log)
    for position in (0, 9, 20, last.stat().st_size - 1):
        flip(last, position)
        timeline = Timeline(log, SETTINGS)
        assert facts(timeline.at()) == expected
        assert [str(last) in fault for fault in timeline.faults] == [True]
        flip(last, position)
    os.truncate(last, 100)
    timeline = Timeline(log, SETTINGS)
    assert facts(timeline.at()) == expected
    assert len(timeline.faults) == 1


def test_key_frames_of_another_log_or_of_other_settings_are_not_used(log: Path, tmp_path: Path) -> None:
    index_log(log)
    stream = Stream("other")
    other = write_log(tmp_path / "other", (stream.batch(stored((0, [7]))) for _ in range(NUM_RECORDS)))
    for frame in frames(log):
        (other / frame.name).write_bytes(frame.read_bytes())
    timeline = Timeline(other, SETTINGS)
    assert num_pages(timeline) == 1
    assert all("belongs to another log" in fault for fault in timeline.faults)
    timeline = Timeline(log, IndexerSettings(max_pages=10))
    assert num_pages(timeline) == 10
    assert timeline.faults == []


def test_a_damaged_time_index_is_named_and_the_records_are_read(log: Path) -> None:
    index_log(log)
    path = min(log.glob("*.kvtimes"))
    flip(path, 30)
    timeline = Timeline(log, SETTINGS)
    assert num_pages(timeline, LogMoment(time_s=1020)) == 21
    assert [str(path) in fault for fault in timeline.faults] == [True]


def test_damaged_records_are_named_and_the_others_are_used(log: Path) -> None:
    segment = sorted(log.glob("*.kvlog"))[1]
    flip(segment, 24 + 12 + 50)
    timeline = Timeline(log, SETTINGS)
    first = int(segment.stem)
    assert num_pages(timeline) == NUM_RECORDS - 1
    assert [(error.segment, error.position, error.index) for error in timeline.damage] == [(segment, 24, first)]
    assert index_log(log)
    assert num_pages(Timeline(log, SETTINGS)) == NUM_RECORDS - 1


def test_a_missing_segment_is_named_and_the_others_are_used(log: Path) -> None:
    _, second, third, *_ = sorted(log.glob("*.kvlog"))
    second.unlink()
    timeline = Timeline(log, SETTINGS)
    lost = int(third.stem) - int(second.stem)
    assert num_pages(timeline) == NUM_RECORDS - lost
    assert [
        (error.index, f"records up to {int(third.stem)} are missing" in str(error)) for error in timeline.damage
    ] == [(int(second.stem), True)]


def test_a_segment_after_a_damaged_end_has_a_key_frame_at_its_first_record(log: Path) -> None:
    first, second, *_ = sorted(log.glob("*.kvlog"))
    os.truncate(first, first.stat().st_size - 10)
    expected = facts(Timeline(log, SETTINGS).at())
    index_log(log, frame_cost=10**9)
    first.unlink()
    timeline = Timeline(log, SETTINGS)
    assert facts(timeline.at()) == expected
    assert num_pages(timeline, LogMoment(index=int(second.stem))) == int(second.stem) - 1


def test_an_indexer_that_is_overtaken_by_deletions_goes_on_at_the_oldest_record(log: Path) -> None:
    indexer = LogIndexer(log, SETTINGS)
    first, second, *_ = sorted(log.glob("*.kvlog"))
    first.unlink()
    indexer.advance()
    assert indexer.next_index == NUM_RECORDS
    assert num_pages(Timeline(log, SETTINGS)) == NUM_RECORDS - int(second.stem)


def write_more(folder: Path, stream: Stream, first: int, number: int) -> None:
    """Write batches, one a second. Batch i stores page i + 1."""
    write_log(folder, (stream.batch(stored((0, [i + 1])), now=1000.5 + i) for i in range(first, first + number)), 1500)


def delete_before(folder: Path, index: int) -> None:
    """Delete the oldest files, as retention does."""
    for path in folder.glob("*.kv*"):
        if int(path.name.partition(".")[0]) < index:
            path.unlink()


def test_key_frames_of_views_without_a_beginning_say_so(tmp_path: Path) -> None:
    """After the settings change, the key frames of a log that begins late are of no use, and new ones lack the same."""
    write_more(tmp_path, Stream("w"), 0, 40)
    LogIndexer(tmp_path, SETTINGS).advance()
    segments = [int(path.stem) for path in sorted(tmp_path.glob("*.kvlog"))]
    delete_before(tmp_path, segments[2])
    changed = IndexerSettings(max_pages=2000)
    LogIndexer(tmp_path, changed).advance()
    delete_before(tmp_path, segments[4])
    timeline, beginning = Timeline(tmp_path, changed), open_beginning(tmp_path, changed)
    assert [view.state for view in timeline.at().namespaces.views] == [ViewState.STALE]
    assert [f"the records before {segments[4]} are deleted" in warning for warning in timeline.warnings] == [True]
    assert (beginning.fault, [beginning.warning]) == ("", timeline.warnings)
    (stream,) = audit_log(tmp_path).streams
    assert (stream.earlier_batches, stream.first_bad_batch, stream.not_live_s) == (segments[4], None, 0)


def test_key_frames_are_whole_again_after_every_worker_agreed(tmp_path: Path) -> None:
    stream = Stream("w")
    write_more(tmp_path, stream, 0, 20)
    delete_before(tmp_path, int(sorted(tmp_path.glob("*.kvlog"))[1].stem))
    indexer = LogIndexer(tmp_path, SETTINGS)
    indexer.advance()
    timeline = Timeline(tmp_path, SETTINGS)
    assert [view.state for view in timeline.at().namespaces.views] == [ViewState.STALE]
    assert len(timeline.warnings) == 1
    write_log(tmp_path, [stream.resync(now=1030.0)])
    write_more(tmp_path, stream, 30, 40)
    indexer.advance()
    timeline = Timeline(tmp_path, SETTINGS)
    assert [view.state for view in timeline.at().namespaces.views] == [ViewState.LIVE]
    assert timeline.warnings == []


def test_what_a_killed_indexer_left_is_deleted(log: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    for name in (f"{0:020d}.kvframe.{ended.pid}", f"{0:020d}.kvtimes.{ended.pid}", f"{0:020d}.kvframe.{os.getppid()}"):
        (log / name).write_bytes(b"unfinished")
    index_log(log)
    assert [path.name for path in log.glob("*.kv*.*")] == [f"{0:020d}.kvframe.{os.getppid()}"]


def test_a_worker_that_is_silent_for_long_is_dropped_as_in_a_service(tmp_path: Path) -> None:
    settings = IndexerSettings(max_pages=1000, forget_after_s=60)
    silent, heard = Stream("silent"), Stream("heard")
    with EventLogWriter(tmp_path, segment_bytes=3000) as writer:
        for second in range(0, 200, 2):
            if second < 100:
                writer.append(silent.batch(stored((0, [second + 1])), now=1000 + second))
            writer.append(heard.batch(stored((0, [5000 + second])), now=1000 + second))
    moments = [LogMoment(time_s=1000 + second) for second in range(0, 199, 3)]
    timeline = Timeline(tmp_path, settings)
    expected = [facts(timeline.at(moment)) for moment in moments]
    workers = [{stream.worker for stream in each["views"]} for each in expected]
    last = max(i for i, found in enumerate(workers) if "silent" in found) * 3
    assert 98 + 60 <= last <= 98 + 60 + 13
    LogIndexer(tmp_path, settings, frame_cost=2000).advance()
    timeline = Timeline(tmp_path, settings)
    assert [facts(timeline.at(moment)) for moment in moments] == expected


def test_an_older_epoch_takes_the_place_of_an_expired_worker(tmp_path: Path) -> None:
    expired, older, heard = Stream("w"), Stream("w"), Stream("heard")
    expired.epoch, older.epoch = 5, 3
    heartbeats = (heard.batch(now=1001 + second) for second in range(60))
    first, last = expired.batch(stored((0, [1, 2])), now=1000), older.batch(stored((0, [3])), now=1061)
    write_log(tmp_path, [first, *heartbeats, last])
    timeline = Timeline(tmp_path, SETTINGS)
    assert [num_pages(timeline, LogMoment(index=index)) for index in (1, 61, 62)] == [2, 2, 1]


def test_the_size_of_a_bounded_log_counts_key_frames_which_are_deleted_with_it(log: Path) -> None:
    index_log(log)
    with EventLogWriter(log, segment_bytes=1000) as writer:
        bound = num_bytes(log) // 2
        LogRetention(log, writer, bound, max_age_s=None).enforce()
    assert num_bytes(log) <= bound
    oldest = min(int(path.stem) for path in log.glob("*.kvlog"))
    assert 0 < oldest <= min(int(path.stem) for path in (*frames(log), *log.glob("*.kvtimes")))
    assert num_pages(Timeline(log, SETTINGS)) == NUM_RECORDS


def test_a_timeline_sees_what_is_appended_after_a_refresh(log: Path) -> None:
    timeline = Timeline(log, SETTINGS)
    assert timeline.at().applier.records == NUM_RECORDS
    assert timeline.next() is None
    write_log(log, [Stream("w-2").batch(stored((0, [500])), now=2000)])
    timeline.refresh()
    views = timeline.next()
    assert views is not None
    assert views.applier.records == NUM_RECORDS + 1


def test_changes_are_the_batches_of_one_worker_between_two_moments(log: Path) -> None:
    stream, decision = Stream("w-1"), LogRecord(0, 0, 1_060_000, b"router", b"w-1", Channel.DECISIONS)
    broken = decision._replace(key=b"broken", channel=Channel.EVENTS)
    write_log(log, [decision, broken, stream.batch(now=1060), stream.batch(removed([2]), now=1061)])
    timeline = Timeline(log, SETTINGS)
    found = list(timeline.changes("w-1", LogMoment(index=10), LogMoment(time_s=1019)))
    assert [each.record_index for each in found] == list(range(11, 20, 2))
    step = found[0].batch.steps[0]
    assert isinstance(step, StoredPages)
    assert step.hashes.tolist() == [12]
    assert [each.record_index for each in timeline.changes("w-1", LogMoment(time_s=1055))] == [57, 59, NUM_RECORDS + 3]
    assert len(list(timeline.changes("w-0"))) == NUM_RECORDS / 2
    assert list(timeline.changes("w")) == []


def test_an_empty_log_has_no_moments(tmp_path: Path) -> None:
    EventLogWriter(tmp_path).close()
    timeline = Timeline(tmp_path, SETTINGS)
    assert (timeline.next(), timeline.previous(), timeline.extent.span_s) == (None, None, None)
    assert timeline.at().namespaces.views == []
    with pytest.raises(EventLogError, match="no such folder"):
        Timeline(tmp_path / "other", SETTINGS)


def test_files_that_cannot_be_written_are_named_once_however_long_it_lasts(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_log(tmp_path, [Stream("w-0").batch(stored((0, [1])), now=1000)])
    indexer = LogIndexer(tmp_path, frame_cost=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        for _ in range(5):
            indexer.advance()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(indexer.failures) <= 2
    assert "File too large" in indexer.failures["key frame"]
