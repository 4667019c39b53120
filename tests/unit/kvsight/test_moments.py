"""`--at`: the forms of a moment, and moments outside a log."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kv_events.errors import InvalidValueError
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.records import LogRecord
from kv_events.runtime.words import local_time
from kvsight.cli.logs.reading import moment_fault


@pytest.fixture
def extent() -> LogExtent:
    found = LogExtent("run.log")
    for index, (partition, offset) in enumerate([(0, 100), (1, 7), (0, 101)], 40):
        found.note(index, LogRecord(partition, offset, 1_000_000 + index * 1000, b"", b""))
    return found


@pytest.fixture
def berlin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def test_a_moment_is_a_time_an_index_or_positions() -> None:
    assert LogMoment.parse("1500").index == 1500
    assert LogMoment.parse("@1769860800.5").time_s == 1769860800.5
    assert LogMoment.parse("0:120,1:98").offsets == {0: 120, 1: 98}
    assert LogMoment.parse("2026-01-31T12:00:00Z").time_s == 1769860800
    assert LogMoment.parse(None).time_s is None


@pytest.mark.usefixtures("berlin")
def test_a_time_without_a_zone_is_local() -> None:
    moment = LogMoment.parse("2026-01-31T13:00:00")
    assert (moment.time_s, moment.is_naive) == (1769860800, True)
    assert not LogMoment.parse("2026-01-31T13:00:00+01:00").is_naive
    assert local_time(1769860800) == "2026-01-31 13:00:00.000+01:00"


@pytest.mark.parametrize("text", ["noon", "1:", "1:2,", ":3", "-1", "@inf", "@1e300", "0001-01-01T00:00", "9" * 5000])
def test_what_is_no_moment_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"--at: got .*, expected a time .*PARTITION:OFFSET"):
        LogMoment.parse(text, "--at")


@pytest.mark.parametrize("inside", ["41", "43", "@1040", "@1042", "0:101,1:7", "0:102,1:8"])
def test_a_moment_inside_the_log_has_no_fault(extent: LogExtent, inside: str) -> None:
    assert moment_fault(extent, LogMoment.parse(inside)) == ""


@pytest.mark.parametrize(
    ("outside", "words"),
    [
        ("40", "before the start of the log, whose moments are 41 to 43"),
        ("44", "behind the end of the log, whose moments are 41 to 43"),
        ("@1039.9", f"before the start of the log, which has records from {local_time(1040)} to {local_time(1042)}"),
        ("@1042.1", "behind the end of the log, which has records from "),
        ("0:99", "before the start of the log, which has records 0:100 to 0:101"),
        ("1:9", "behind the end of the log, which has records 1:7 to 1:7"),
        ("2:1", "outside the log, which has no partition 2"),
    ],
)
def test_a_moment_outside_the_log_is_named_with_the_extent(extent: LogExtent, outside: str, words: str) -> None:
    assert f"--at {outside} is {words}" in moment_fault(extent, LogMoment.parse(outside))


def test_an_empty_log_has_no_moment() -> None:
    assert moment_fault(LogExtent("run.log"), LogMoment.parse(None)) == "run.log: the log is empty"
