"""`kvsight audit` as people run it."""

import shlex
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs

from analysis.audit.audit import audit_log
from kv_events.log.event_log import EventLogWriter
from kv_events.records import Channel, LogRecord
from kv_events.schema import SnapshotBegin, SnapshotEnd
from simulation import SimulationSettings, WorkloadSettings, generate, simulate
from tests.engines.chat_model import trained_tokenizer
from tests.support.commands import kvsight, printed
from tests.support.log.deciding_fleet import DecidingFleet
from tests.support.log.late_log import write_log
from tests.support.log.plain_log import flip, tear
from tests.support.log.records import Stream, records_of, removed, stored


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a fleet whose caches are too small, with decisions."""
    folder = tmp_path_factory.mktemp("run")
    settings = SimulationSettings(workers=3, capacity_tokens=8192, event_log_dir=folder)
    simulate(generate(WorkloadSettings(num_requests=80)), settings, ["overlap-load"])
    return folder / "overlap-load"


as_json = partial(printed, "audit")


def test_the_verdict_comes_first_and_lines_fit_a_terminal(recorded: Path) -> None:
    done = kvsight("audit", recorded)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("verdict: ")
    assert "of the stored pages were evicted within 10 s" in lines[1]
    tables = [line for line in lines if line.startswith(("stream  ", "pages  ", "last page", "lost before", "held"))]
    assert len(tables) > 4
    assert max(map(len, tables)) <= 80
    assert "funnel of 80 requests, 80 with a known outcome" in lines


def test_json_has_all_of_it(recorded: Path) -> None:
    report = as_json(recorded)
    assert report["funnel"]["requests"] == 80
    assert len(report["streams"]) == 3
    assert set(report["pages"]) == {
        "stored", "removed", "double", "orphan", "unknown", "churned", "bounced", "swept",
    }  # fmt: skip
    assert report["hottest"][0]["requests"] > 1
    more = as_json(recorded, "--churn", 1000)["pages"]["churned"][0]
    assert more >= report["pages"]["churned"][0] > 0


def test_the_examples_can_be_explained(recorded: Path, tmp_path: Path) -> None:
    done = kvsight("audit", recorded, "--examples", tmp_path / "lost")
    commands = [line.strip() for line in done.stdout.splitlines() if line.startswith("  kvsight explain")]
    assert commands
    explained = kvsight(*shlex.split(commands[0])[1:])
    assert explained.returncode == 0, explained.stderr
    assert "pages" in explained.stdout
    assert "--examples FOLDER" in kvsight("audit", recorded).stdout


def test_prefixes_are_shown_as_text(tmp_path: Path) -> None:
    tokenizer, text = trained_tokenizer(), "the first words of a prompt, what comes between them, and the last ones"
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode(text).ids
    tokens = tokens[: len(tokens) // 4 * 4]
    pages = range(1, len(tokens) // 4 + 1)
    store = structs.replace(stored((0, pages)), token_ids=np.array(tokens, "<u4").tobytes())
    write_log(tmp_path / "log", [LogRecord(0, 0, 1, b"", b"garbage"), *(Stream(each).batch(store) for each in "ab")])
    assert as_json(tmp_path / "log")["hottest"][0]["text"] == ""
    (found,) = as_json(tmp_path / "log", "--tokenizer-file", tmp_path / "tokenizer.json")["hottest"]
    begin, end = found["text"].split(" … ")
    whole = tokenizer.decode(tokens)
    assert whole.startswith(begin)
    assert whole.endswith(end)
    assert min(len(begin), len(end)) > 3
    assert found["text"] in kvsight("audit", tmp_path / "log", "--tokenizer-file", tmp_path / "tokenizer.json").stdout
    refused = kvsight("audit", tmp_path / "log", "--tokenizer-file", tmp_path / "log")
    assert refused.returncode == 2
    assert "tokenizer" in refused.stderr.lower()
    assert "Traceback" not in refused.stderr


def test_the_first_bad_batch_and_lost_batches_are_named(tmp_path: Path) -> None:
    good, bad, torn = Stream("good"), Stream("bad"), Stream("torn")
    with EventLogWriter(tmp_path) as writer:
        for number in range(20):
            now = 1_700_000_000.0 + number
            writer.append(good.batch(stored((0, [number + 1])), now=now))
            writer.append(bad.batch(stored((0, [number + 1])), now=now, digest=bytes(64) if number > 4 else None))
            record = torn.batch(stored((0, [number + 1])), now=now)
            if number not in (7, 8):
                writer.append(record)
        writer.append(torn.batch(SnapshotBegin("gap"), stored((0, range(1, 21))), SnapshotEnd(), now=now + 1))
    report = audit_log(tmp_path)
    assert {each.worker: each.not_live_s for each in report.streams}["torn"] == 11.0
    (resync,) = report.resyncs
    assert (resync.reason, resync.pages, resync.is_complete) == ("gap", 20, True)
    findings = {each.kind: each.text for each in report.findings}
    assert {"digest", "gap", "not live"} <= findings.keys()
    assert "The first is record 16, default/m/bad/0, seq 5, 2023-11-14T22:13:25.000Z" in findings["digest"]


def test_a_log_that_begins_late_has_no_gap_but_those_in_it(tmp_path: Path) -> None:
    stream = Stream("w")
    for _ in range(5):
        stream.batch(stored((0, [stream.seq + 1])), now=1_700_000_000.0)
    with EventLogWriter(tmp_path) as writer:
        writer.append(stream.batch(stored((0, [100])), now=1_700_000_001.0))
        writer.append(stream.batch(removed([1]), stored((2, [200])), now=1_700_000_002.0))
    report = audit_log(tmp_path)
    assert (sum(report.pages["unknown"]), sum(report.pages["orphan"])) == (1, 1)
    assert (report.streams[0].earlier_batches, report.streams[0].not_live_s) == (5, 0.0)
    assert [each.kind for each in report.findings] == ["before the log"]
    assert "begins after the first batches of 1 of 1 stream: 5 batches before it" in report.verdict
    stream.batch(stored((0, [300])), now=1_700_000_003.0)  # it is lost
    write_log(tmp_path, (stream.batch(now=1_700_000_000.0 + second) for second in range(4, 13)))
    (found,) = audit_log(tmp_path).streams
    assert (found.earlier_batches, found.gaps, found.missing_batches, found.not_live_s) == (5, 1, 1, 8.0)


def test_the_good_part_of_a_damaged_log_is_audited(tmp_path: Path) -> None:
    fleet = DecidingFleet(tmp_path, 1)
    fleet.decide(60)
    whole = msgspec.to_builtins(audit_log(tmp_path))
    (segment,) = tmp_path.glob("*.kvlog")
    flip(segment, segment.stat().st_size // 2)
    report = as_json(tmp_path, code=1)
    counts = [each["records"] + each["funnel"]["requests"] + each["funnel"]["outcomes"] for each in (report, whole)]
    assert counts[0] in (counts[1] - 1, counts[1] - 2)  # one record, and an outcome whose decision it was
    (said,) = report["damage"]
    assert f"{segment}: a record's checksum is wrong at byte " in said
    assert "damage: " in kvsight("audit", tmp_path).stdout


def test_decisions_beside_the_log_count(tmp_path: Path) -> None:
    fleet = DecidingFleet(tmp_path / "log", 2)
    fleet.decide(40)
    whole = audit_log(tmp_path / "log").funnel
    split = tmp_path / "split"
    with EventLogWriter(split) as events, EventLogWriter(split / "decisions") as decisions:
        for record in records_of(tmp_path / "log"):
            (decisions if record.channel == Channel.DECISIONS else events).append(record)
    assert audit_log(split).funnel == whole


def test_times_that_no_calendar_has_are_shown_as_numbers(tmp_path: Path) -> None:
    forged = Stream("w")
    with EventLogWriter(tmp_path) as writer:
        for now in (1e308, -1e308, 1e15):
            record = forged.batch(stored((0, [1, 2])), now=1.0, digest=bytes(64))
            batch = msgspec.msgpack.decode(record.payload)
            batch[8] = now
            writer.append(record._replace(payload=msgspec.msgpack.encode(batch), timestamp_ms=2**62))
    done = kvsight("audit", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 records" in done.stdout
    assert done.stdout.startswith("verdict: 1 of 1 stream had batches whose digest differs")


def test_a_log_without_pages_has_no_peak(tmp_path: Path) -> None:
    write_log(tmp_path, [Stream("w").batch(now=1_700_000_000.0)])
    assert "0 pages/s stored and removed; " in kvsight("audit", tmp_path).stdout
    assert as_json(tmp_path)["rates"]["peak_time"] is None


def test_a_torn_tail_is_damage(tmp_path: Path) -> None:
    segment = tear(write_log(tmp_path, [Stream("w").batch(stored((0, [1])), now=1_700_000_000.0)]))
    report = as_json(tmp_path, code=1)
    assert [f"{segment}: a torn tail of 3 bytes at byte " in each for each in report["damage"]] == [True]
    assert "1 part of the log cannot be read" in report["verdict"]


def test_a_decision_that_cannot_be_decoded_is_no_record_none(tmp_path: Path) -> None:
    EventLogWriter(tmp_path).close()
    assert audit_log(tmp_path).verdict == "The log has no batches."
    with EventLogWriter(tmp_path) as writer:
        writer.append(Stream("w").batch(stored((0, [1])), now=1_700_000_000.0))
        writer.append(LogRecord(0, 0, 1_700_000_001_000, b"router", b"\xc1", Channel.DECISIONS))
    (finding,) = audit_log(tmp_path).findings
    assert finding.text == "1 record cannot be decoded (decision 1)"
