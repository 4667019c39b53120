"""`kvsight log`: event logs as files."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.replay import LogIndexer, Timeline
from indexer.settings import IndexerSettings
from kv_events.codec import encode_resync
from kv_events.log.event_log import EventLogWriter
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.schema import AllBlocksCleared, ResyncRequest
from tests.support.commands import ENVIRONMENT, KVSIGHT, invoke
from tests.support.effort import num_examples
from tests.support.log.faulty_run import faulty_run
from tests.support.log.late_log import write_log
from tests.support.log.plain_log import flip, tear
from tests.support.log.records import Stream, records_of, removed, stored
from tests.support.log.version_1 import write_version_1
from tests.support.log.view_facts import facts
from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]
START_MS = 1_700_000_000_000
write = partial(write_log, segment_bytes=1500)


def cat(*words: object) -> list[dict[str, Any]]:
    done = invoke("tail", "--full", "--log", *words)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def records() -> list[LogRecord]:
    """Two workers that store and remove pages, one record each 100 ms; and records of other channels."""
    streams = [Stream("w-0"), Stream("w-1", model="n")]
    found: list[LogRecord] = []
    for i in range(40):
        event = removed([98 + i]) if i % 4 == 2 else stored((0, [100 + i]), tier=i % 2)
        record = streams[i % 2].batch(event, now=START_MS / 1000 + i / 10)
        found.append(record._replace(partition=i % 2, offset=500 + i))
    found.append(streams[0].batch(AllBlocksCleared(), now=START_MS / 1000 + 4)._replace(offset=600))
    request = encode_resync(ResyncRequest("default/m/w-0/0", 1, "gap"))
    found.append(LogRecord(0, 7, START_MS + 4100, b"default/m/w-0/0", request, Channel.CONTROL))
    found.append(LogRecord(0, 8, START_MS + 4200, b"router", b"\xc1", Channel.DECISIONS))
    return found


@pytest.fixture
def log(records: list[LogRecord], tmp_path: Path) -> Path:
    return write(tmp_path / "run.log", records)


def test_info_shows_the_span_the_streams_and_the_pages(log: Path) -> None:
    done = invoke("log", "info", log)
    assert done.exit_code == 0
    assert "records 0 to 42" in done.stdout
    assert "43 records: 41 events, 1 control, 1 decisions; 0 key frames" in done.stdout
    found = json.loads(invoke("log", "info", log, "--json").stdout)
    assert (found["first_ms"], found["last_ms"], found["damage"]) == (START_MS, START_MS + 4200, [])
    assert found["channels"] == {"events": 41, "control": 1, "decisions": 1}
    streams = {each["worker"]: each for each in found["streams"]}
    assert [(w["records"], w["pages_stored"], w["pages_removed"]) for w in streams.values()] == [
        (21, 10, 10),
        (20, 20, 0),
    ]


def test_cat_prints_each_record_as_json(log: Path, records: list[LogRecord]) -> None:
    found = cat(log)
    assert [each["index"] for each in found] == list(range(len(records)))
    assert [(each["partition"], each["offset"], each["time_ms"]) for each in found] == [r[:3] for r in records]
    first, removal, clear, request, decision = found[0], found[2], found[40], found[41], found[42]
    assert first["events"] == [
        {
            "type": "stored",
            "medium": "gpu",
            "chains": [{"start": 0, "parent": 0}],
            "sequence_hashes": [100],
            "block_hashes": [100],
        }
    ]
    assert removal["events"] == [{"type": "removed", "medium": "gpu", "sequence_hashes": [100], "block_hashes": [100]}]
    assert clear["events"] == [{"type": "cleared"}]
    assert (request["channel"], request["stream"], request["reason"]) == ("control", "default/m/w-0/0", "gap")
    assert (decision["channel"], "malformed" in decision["rejected"]) == ("decisions", True)


@pytest.mark.parametrize(
    ("filters", "indices"),
    [
        (["--worker", "w-1", "--limit", "2"], [1, 3]),
        (["--model", "n", "--from", "37"], [37, 39]),
        (["--medium", "cpu", "--to", "4"], [1, 3]),
        (["--sequence-hash", "101"], [1]),
        (["--sequence-hash", "0x65", "--sequence-hash", "100"], [0, 1, 2]),
        (["--block-hash", "104"], [4, 6]),
        (["--worker", "w-0", "--seq", "3-4"], [6, 8]),
        (["--from", f"@{START_MS / 1000 + 1}", "--to", f"@{START_MS / 1000 + 1.2}"], [10, 11, 12]),
        (["--from", "0:504,1:507", "--to", "0:507"], [4, 6]),
        (["--from", "0:0", "--to", "0:504"], [0, 2]),
        (["--channel", "control", "--channel", "decisions"], [41, 42]),
        (["--from", "41"], [41, 42]),
        (["--worker", "nobody"], []),
    ],
)
def test_cat_filters(log: Path, filters: list[str], indices: list[int]) -> None:
    assert [each["index"] for each in cat(log, *filters)] == indices


def test_filters_that_fit_no_record_are_one_line(log: Path) -> None:
    done = invoke("tail", "--log", log, "--from", 0, "--worker", "nobody")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"{log}: no record matches\n")


def test_verify_names_damage_with_its_place_and_uses_the_rest(log: Path) -> None:
    assert invoke("log", "info", "--verify", log).exit_code == 0
    first, second, third, *_, last = sorted(log.glob("*.kvlog"))
    next_record = 24 + 12 + int.from_bytes(first.read_bytes()[24:28], "little")
    flip(first, 24 + 12 + 40)
    flip(first, next_record + 3)
    second.unlink()
    os.truncate(last, last.stat().st_size - 1)
    done = invoke("log", "info", "--verify", log)
    assert done.exit_code == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("damaged: ")]
    assert f"{first}: a record's checksum is wrong at byte 24, record 0" in lines[0]
    assert f"{last}: a torn tail of" in lines[-1]
    found = json.loads(invoke("log", "info", "--verify", log, "--json").stdout)
    lost = 3 + int(third.stem) - int(second.stem)
    assert (found["records"], found["next_index"]) == (43 - lost, 42)
    done = invoke("tail", "--full", "--log", log)
    assert (done.exit_code, len(done.stdout.splitlines())) == (1, 43 - lost)
    assert invoke("log", "info", log).exit_code == 1


def test_a_missing_segment_is_named(log: Path) -> None:
    first, second, third, *_ = sorted(log.glob("*.kvlog"))
    second.unlink()
    done = invoke("log", "info", "--verify", log)
    missing = f"{first}: records up to {int(third.stem)} are missing at byte {first.stat().st_size}"
    assert (done.exit_code, len(done.stderr.splitlines()), missing in done.stderr) == (1, 1, True)


def test_damaged_key_frames_and_time_indices_are_named(log: Path) -> None:
    LogIndexer(log).advance()
    times = min(log.glob("*.kvtimes"))
    frame = log / f"{5:020d}.kvframe"
    frame.write_bytes(b"KVSFRM02 and more")
    flip(times, 20)
    done = invoke("log", "info", "--verify", log)
    assert done.exit_code == 1
    assert f"damaged: {times}" in done.stderr
    assert f"damaged: {frame}" in done.stderr


def test_logs_of_both_versions_are_read(records: list[LogRecord], tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    write_version_1(folder, records[:10])
    write(folder, records[10:])
    assert invoke("log", "info", "--verify", folder).exit_code == 0
    assert len(cat(folder)) == len(records)


def test_a_slice_by_time_opens_at_the_same_moments_with_the_same_views(log: Path, tmp_path: Path) -> None:
    assert invoke("log", "slice", log, tmp_path / "part", "--from", f"@{START_MS / 1000 + 2}").exit_code == 0
    until = LogMoment(time_s=START_MS / 1000 + 3)
    assert facts(Timeline(tmp_path / "part").at(until)) == facts(Timeline(log).at(until))


@pytest.mark.parametrize(
    ("flags", "indices"),
    [
        ("--worker w-1", range(1, 40, 2)),
        ("--channel control", [41]),
        ("--from 0:538", [*range(1, 38, 2), 38, 39, 40]),  # of events alone, whose offsets these are
    ],
)
def test_a_slice_has_the_records_of_a_worker_a_channel_or_a_range_of_offsets(
    flags: str, indices: Sequence[int], log: Path, tmp_path: Path
) -> None:
    assert invoke("log", "slice", log, tmp_path / "part", *flags.split()).exit_code == 0
    whole = records_of(log)
    assert records_of(tmp_path / "part") == [whole[index] for index in indices]


def test_the_model_of_a_stream_is_named_without_its_group(tmp_path: Path) -> None:
    streams = [Stream("w-0", model="m#mamba"), Stream("w-1", model="n")]
    folder = write(tmp_path / "log", [stream.batch(stored((0, [1])), now=1000) for stream in streams])
    assert invoke("log", "slice", folder, tmp_path / "part", "--model", "m").exit_code == 0
    assert [record.key for record in records_of(tmp_path / "part")] == [records_of(folder)[0].key]


@pytest.mark.parametrize(
    ("words", "corrected"),
    [(["slice", "new", "--from", "900"], "9"), (["export", "--parquet", "new", "--at", "@1"], "9")],
)
def test_a_command_with_a_moment_outside_the_log_can_be_repeated(
    log: Path, tmp_path: Path, words: list[str], corrected: str
) -> None:
    command, *others = (str(tmp_path / word) if word == "new" else word for word in words)
    assert "the log" in str(invoke("log", command, log, *others).exception)
    assert not (tmp_path / "new").exists()
    assert invoke("log", command, log, *others[:-1], corrected).exit_code == 0


def test_the_damage_of_all_logs_is_named(log: Path, records: list[LogRecord], tmp_path: Path) -> None:
    other = write(tmp_path / "other", records)
    for folder in (log, other):
        flip(min(folder.glob("*.kvlog")), 24 + 12 + 40)
    for words in (["log", "merge", log, other, tmp_path / "both"], ["replay", log, "--diff", other]):
        done = invoke(*words)
        named = [line for line in done.stderr.replace("\n", "").split("damaged: ") if "next sound record" in line]
        assert (done.exit_code, len(named)) == (1, 2), done.stderr


def test_overlapping_recordings_merge_to_the_whole(log: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert invoke("log", "slice", log, first, "--to", 30).exit_code == 0
    assert invoke("log", "slice", log, second, "--from", 10).exit_code == 0
    assert invoke("log", "merge", second, first, tmp_path / "both").exit_code == 0
    assert records_of(tmp_path / "both") == records_of(log)


@given(st.integers(0, 2**32), st.integers(2, 60))
@settings(max_examples=num_examples(8), deadline=None)
def test_slices_of_any_log_are_its_parts_and_merge_to_all_its_records(seed: int, length: int) -> None:
    random = Random(seed)
    with TemporaryDirectory() as name:
        folder = write(Path(name, "log"), faulty_run(random, length))
        whole = records_of(folder)
        cuts = sorted(random.randrange(len(whole) + 1) for _ in range(2))
        parts = []
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(whole)], strict=True)):
            if start < stop:
                parts.append(Path(name, str(number)))
                assert invoke("log", "slice", folder, parts[-1], "--from", start, "--to", stop).exit_code == 0
                assert records_of(parts[-1]) == whole[start:stop]
                settings = IndexerSettings()
                assert facts(Timeline(parts[-1], settings).at()) == facts(
                    Timeline(folder, settings).at(LogMoment(index=stop))
                )
        if len(parts) > 1:
            assert invoke("log", "merge", *parts, Path(name, "merged")).exit_code == 0
            assert set(records_of(Path(name, "merged"))) == set(whole)  # what two parts have is merged once


def test_a_full_disk_leaves_the_source_and_what_was_copied(log: Path, tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    before = records_of(log)
    copy = tmp_path / "copy"
    done = subprocess.run(
        [sys.executable, "-m", "kvsight", "log", "slice", str(log), str(copy)],
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=limit,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kvsight: ")
    assert "File too large" in done.stderr
    assert records_of(log) == before
    assert records_of(copy) == before[: len(records_of(copy))]


def test_the_documented_queries_run_on_an_export(log: Path, tmp_path: Path) -> None:
    """DuckDB runs in a process of its own: it prints warnings when its process ends."""
    whole, early = tmp_path / "run.parquet", tmp_path / "early"
    done = invoke("log", "export", log, "--parquet", whole)
    assert (done.exit_code, "41 rows of events, 20 pages held" in done.stderr) == (0, True), done.stderr
    assert "not an empty folder" in str(invoke("log", "export", log, "--parquet", whole).exception)
    assert invoke("log", "export", log, "--parquet", early, "--at", 10).exit_code == 0
    documented = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "debugging.md").read_text(), re.DOTALL)
    assert len(documented) == 3
    queries = [
        *(query.replace("run.parquet", str(whole)) for query in documented),
        f"select event, count(*) from '{whole}/events.parquet' group by all order by 1",
        f"select worker, cpu, count(*) from '{whole}/views.parquet' group by all",
        f"select sequence_hash from '{early}/views.parquet' order by 1",
    ]
    program = "import duckdb, json, sys; run = duckdb.connect().execute; "
    program += "print(json.dumps([run(query).fetchall() for query in sys.argv[1:]], default=str))"
    ran = run_program(program, *queries)
    assert ran.returncode == 0, ran.stderr
    *results, events, held, pages = json.loads(ran.stdout)
    assert all(results)
    assert events == [["cleared", 1], ["removed", 10], ["stored", 30]]
    assert held == [["w-1", True, 20]]
    assert [page for (page,) in pages] == [101, 103, 105, 107, 108, 109]


def test_commands_that_write_report_it_as_json(log: Path, tmp_path: Path) -> None:
    commands: list[tuple[list[object], dict[str, object]]] = [
        (["slice", log, tmp_path / "a", "--to", "5"], {"new_log": str(tmp_path / "a"), "records": 5}),
        (["merge", tmp_path / "a", log, tmp_path / "b"], {"new_log": str(tmp_path / "b"), "records": 43}),
        (
            ["export", log, "--parquet", tmp_path / "c"],
            {"folder": str(tmp_path / "c"), "event_rows": 41, "pages_held": 20},
        ),
    ]
    sound = {"damage": [], "torn_tail_bytes": 0, "faults": []}
    for words, expected in commands:
        done = invoke("log", *words, "--json")
        assert (done.exit_code, json.loads(done.stdout)) == (0, expected | sound), done.stderr
    tear(log)
    done = invoke("log", "merge", tmp_path / "a", log, tmp_path / "d", "--json")
    assert (done.exit_code, json.loads(done.stdout)["torn_tail_bytes"]) == (1, 3)


@pytest.mark.parametrize("words", [["log", "info"], ["log", "info", "--json"], ["tail", "--full", "--log"]])
def test_a_reader_that_has_enough_ends_a_command_without_a_word(log: Path, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = subprocess.run([*KVSIGHT, *words, log], stdout=closed, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words", [["replay"], ["log", "info"], ["log", "info", "--verify"], ["tail", "--full", "--log"]]
)
def test_a_torn_tail_is_damage_for_each_command(log: Path, words: list[str]) -> None:
    assert invoke(*words, log).exit_code == 0
    last = tear(log)
    done = invoke(*words, log)
    assert done.exit_code == 1
    assert f"damaged: {last}: a torn tail of 3 bytes at byte " in done.stderr
    with EventLogWriter(log):
        assert invoke(*words, log).exit_code == 0  # the writer has truncated it
