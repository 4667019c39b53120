"""Log lines about the life of workers."""

from __future__ import annotations

import logging

import pytest

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.worker_log import WorkerLog
from kv_events.records import LogRecord
from kv_events.schema import CLOSED
from tests.support.log.records import Stream, stored

TTL_S = 10.0


class Watched:
    """Views whose changes are logged, with a clock that the test moves."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "indexer.worker_log")
        self.now = 1000.0
        self._caplog = caplog
        self._freshness = Freshness(TTL_S, self.now)
        self._log = WorkerLog(self._freshness)
        self._applier = Applier(Namespaces(IndexerSettings(max_pages=1000)), DeadLetters(), self._freshness)
        self._applier.on_applied.append(lambda view, _batch: self._log.note(view))
        self.look()

    def read(self, *records: LogRecord) -> None:
        for record in records:
            list(self._applier.apply(record, self.now, self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass while the log can be read."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self._freshness.note_log_read(self.now)

    def look(self) -> None:
        self.now += 1.0
        self._log.look(self._applier.namespaces.views, self.now)

    def lines(self) -> list[str]:
        """Return the lines since the last call, without the beginning of the stream's key."""
        self.look()
        lines = [record.getMessage().removeprefix("default/m/") for record in self._caplog.records]
        self._caplog.clear()
        return lines


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Watched:
    watched = Watched(caplog)
    assert watched.lines() == ["0 worker streams are known"]
    return watched


def test_each_change_of_a_workers_life_is_one_line(watched: Watched) -> None:
    stream = Stream()
    stream.clock = lambda: watched.now
    watched.read(stream.batch(stored((0, [1]))))
    assert watched.lines() == ["w0/0 joined"]
    stream.batch(stored((0, [2])))  # lost
    watched.read(stream.batch())
    assert watched.lines() == ["w0/0 is stale: gap"]
    watched.read(stream.resync(), stream.batch())
    assert watched.lines() == ["w0/0 is live again"]
    stream.restart()
    watched.read(stream.batch())
    assert watched.lines() == ["w0/0 restarted"]
    watched.wait(TTL_S + 2)
    assert watched.lines() == ["w0/0 expired: silent for 11 s"]
    watched.read(stream.batch())
    assert watched.lines() == ["w0/0 came back"]
    watched.read(stream.batch(degraded_reason=CLOSED))
    assert watched.lines() == ["w0/0 left: closed"]
    assert watched.lines() == []


def test_a_line_has_the_facts_as_fields(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.read(Stream("w7").batch())
    watched.look()
    (line,) = caplog.records
    facts = vars(line)
    assert (facts["event"], facts["worker"], facts["model"], facts["state"]) == ("joined", "w7", "m", "live")


def test_many_changes_at_once_are_one_line(watched: Watched) -> None:
    streams = [Stream(f"w{i}") for i in range(2000)]
    watched.read(*(stream.batch() for stream in streams))
    assert watched.lines() == ["2000 changes of worker streams: 2000 joined"]
    watched.wait(TTL_S + 2)
    assert watched.lines() == ["2000 changes of worker streams: 2000 expired"]
