"""`kvsight replay --diff` of two logs: the first batch of each stream that differs."""

from pathlib import Path

from kv_events.records import LogRecord
from kv_events.schema import WireEvent
from tests.support.commands import kvsight
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, removed, stored

START = 1_700_000_000.0


def batches(seconds: int = 10, odd: int | None = None) -> list[LogRecord]:
    """A log of two streams. odd: second in which `odd` stores another page, which it removes in the next one."""
    records, streams = [], [Stream("even"), Stream("odd")]
    for second in range(seconds):
        for stream in streams:
            is_odd = odd is not None and stream is streams[1]
            events: list[WireEvent] = [stored((0, [second + 1]))]
            events += [stored((0, [999]))] if is_odd and second == odd else []
            events += [removed([999])] if is_odd and odd is not None and second == odd + 1 else []
            records.append(stream.batch(*events, now=START + second))
    return records


def diff(before: Path, after: Path, *options: object) -> list[str]:
    done = kvsight("replay", before, "--diff", after, *options, environment={"TZ": "UTC"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_logs_that_part_and_meet_again_are_different(tmp_path: Path) -> None:
    one, two = write_log(tmp_path / "one", batches()), write_log(tmp_path / "two", batches(odd=5))
    place = "2023-11-14 22:13:25.000+00:00 (record 11, batch 5)"
    assert diff(one, two) == [
        "the same pages at the end, after different batches",
        f"odd parts at {place} before, {place} after",
    ]
    assert diff(one, write_log(tmp_path / "same", batches())) == ["no difference"]


def test_a_missing_batch_and_the_end_of_a_log_are_named(tmp_path: Path) -> None:
    one, short = write_log(tmp_path / "one", batches()), write_log(tmp_path / "short", batches(seconds=8))
    gone = write_log(tmp_path / "gone", batches()[:6] + batches()[7:])
    assert "odd parts at 2023-11-14 22:13:28.000+00:00 (record 17, batch 8) before, the end after" in diff(one, short)
    (parts,) = (line for line in diff(one, gone) if "parts at" in line)
    assert "even parts at 2023-11-14 22:13:23.000+00:00 (record 6, batch 3) before" in parts
    assert "2023-11-14 22:13:24.000+00:00 (record 7, batch 4) after" in parts


def test_a_log_that_begins_later_or_is_cut_by_its_moment_is_compared_where_both_have_batches(tmp_path: Path) -> None:
    one, late = write_log(tmp_path / "one", batches()), write_log(tmp_path / "late", batches()[4:])
    assert not [line for line in diff(one, late) if "parts at" in line]
    short = write_log(tmp_path / "short", batches(seconds=8))
    assert diff(one, short, "--at", "@1700000007.5") == ["no difference"]
