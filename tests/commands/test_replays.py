"""`kvsight replay`, `explain` and `audit` on logs: any moment, differences, late logs, damage, and impossible times."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from analysis.diff import diff, holdings_of, holdings_of_dump
from indexer.replay import LogIndexer, Timeline, log_indexer
from kv_events.errors import InvalidValueError
from kv_events.hashing import sequence_hashes, token_array
from kv_events.http.explanations import Explanation
from kv_events.log.moments import LogExtent, LogMoment, utc_text
from kv_events.records import LogRecord
from kv_events.runtime.words import local_time
from kvsight.cli.logs import reading
from kvsight.cli.logs.lines import RecordLine
from kvsight.cli.logs.reading import moment_fault
from tests.support.commands import invoke, local_zone, printed
from tests.support.log.late_log import write_late_log, write_log
from tests.support.log.plain_log import flip, segments
from tests.support.log.planted_causes import check_truth, planted
from tests.support.log.planted_scene import VICTIM
from tests.support.log.records import Stream, removed, stored
from tests.support.servers.service_process import ServiceProcess

TOKENS = list(range(1, 33))
PAGES = list(range(1, 21))
HASHES = sequence_hashes(token_array(TOKENS), 4).tolist()


# --- moments --------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two workers store a prompt's pages, one of them two pages on its CPU, and the other one a page more."""
    one, two = Stream("one"), Stream("two")
    records = [
        one.batch(stored((0, HASHES)), now=1000.0),
        two.batch(stored((0, HASHES[:2]), tier=1), now=1001.0),
        one.batch(now=1002.0),
        one.batch(stored((HASHES[-1], [77])), now=1003.0),
    ]
    return write_log(tmp_path / "log", records)


def test_a_replay_shows_scores_and_views_as_they_were(log: Path) -> None:
    def at(moment: str) -> dict[str, list[object]]:
        query = json.dumps({"model_name": "m", "token_ids": TOKENS})
        answer = printed("replay", log, "--at", moment, "--query", "-", stdin=query)
        return {name: [held[tier] for tier in ("gpu", "cpu", "disk")] for name, held in answer["instances"].items()}

    assert at("1") == at("@1000.5") == {"one": [32, 32, 32]}
    assert at("1970-01-01T00:16:41Z") == at("2") == at("0:2") == {"one": [32, 32, 32], "two": [0, 8, 8]}
    views = printed("replay", log)
    assert [(view["worker"], view["GPU"], view["CPU_PINNED"]) for view in views] == [("one", 9, 0), ("two", 0, 2)]
    assert "one" in invoke("replay", log).stdout


def test_a_replay_takes_every_question_that_the_api_takes(log: Path) -> None:
    by_hash = json.dumps({"model_name": "m", "seq_hashes": HASHES[:1]})
    assert printed("replay", log, "--query", "-", stdin=by_hash)["scores"] == {"one": {"0": 4}}
    rfc = json.dumps({"modelname": "m", "block_size": 4, "token_ids": TOKENS, "instance_id": "two"})
    answer = printed("replay", log, "--query", "-", stdin=rfc)
    assert {worker: held["CPU"] for worker, held in answer["default"].items()} == {"two": 8}
    assert "two" in invoke("replay", log, "--query", "-", stdin=rfc).stdout


@local_zone("Europe/Berlin")
def test_a_moment_is_a_time_an_index_or_positions() -> None:
    assert LogMoment.parse("1500").index == 1500
    assert LogMoment.parse("@1769860800.5").time_s == 1769860800.5
    assert LogMoment.parse("0:120,1:98").offsets == {0: 120, 1: 98}
    assert LogMoment.parse("2026-01-31T12:00:00Z").time_s == 1769860800
    assert LogMoment.parse(None).time_s is None
    moment = LogMoment.parse("2026-01-31T13:00:00")
    assert (moment.time_s, moment.is_naive) == (1769860800, True)
    assert not LogMoment.parse("2026-01-31T13:00:00+01:00").is_naive
    assert local_time(1769860800) == "2026-01-31 13:00:00.000+01:00"


@pytest.mark.parametrize("text", ["noon", "1:", "1:2,", ":3", "-1", "@inf", "@1e300", "0001-01-01T00:00", "9" * 5000])
def test_what_is_no_moment_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"--at: got .*, expected a time .*PARTITION:OFFSET"):
        LogMoment.parse(text, "--at")


@pytest.mark.parametrize(
    ("moment", "fault"),
    [
        *((inside, "") for inside in ("41", "43", "@1040", "@1042", "0:101,1:7", "0:102,1:8")),
        ("40", "before the start of the log, whose moments are 41 to 43"),
        ("44", "behind the end of the log, whose moments are 41 to 43"),
        ("@1039.9", f"before the start of the log, which has records from {local_time(1040)} to {local_time(1042)}"),
        ("@1042.1", f"behind the end of the log, which has records from {local_time(1040)} to {local_time(1042)}"),
        ("0:99", "before the start of the log, which has records 0:100 to 0:101"),
        ("1:9", "behind the end of the log, which has records 1:7 to 1:7"),
        ("2:1", "outside the log, which has no partition 2"),
    ],
)
def test_a_moment_outside_the_log_is_named_with_the_extent(moment: str, fault: str) -> None:
    extent = LogExtent("run.log")
    for index, (partition, offset) in enumerate([(0, 100), (1, 7), (0, 101)], 40):
        extent.note(index, LogRecord(partition, offset, 1_000_000 + index * 1000, b"", b""))
    expected = f"run.log: --at {moment} is {fault}" if fault else ""
    assert moment_fault(extent, LogMoment.parse(moment)) == expected
    assert moment_fault(LogExtent("run.log"), LogMoment()) == "run.log: the log is empty"


# --- differences ----------------------------------------------------------------------------------------------------


@pytest.fixture
def changing(tmp_path: Path) -> Path:
    streams = [Stream("engine-2"), Stream("engine-10")]
    records = [
        streams[0].batch(stored((0, [1, 2, 3])), stored((0, [2]), tier=1), now=1000),
        streams[1].batch(stored((0, [1, 2])), now=1001),
        streams[0].batch(removed([1, 2]), stored((0, [7, 8])), now=1002),
    ]
    return write_log(tmp_path / "run.log", records)


def test_the_records_of_a_slice_are_its_own(log: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    assert invoke("log", "slice", log, part, "--from", 1, "--to", 3).exit_code == 0
    query = json.dumps({"model_name": "m", "token_ids": TOKENS})
    for words in (("replay", part), ("explain", part, "--prompt", "-"), ("replay", part, "--diff", log)):
        assert ", after 2 records" in invoke(*words, stdin=query).stderr
    assert ", after 1 record\n" in invoke("replay", part, "--at", 1).stderr


def test_two_moments_of_a_log_differ_by_pages_gained_lost_and_moved(changing: Path) -> None:
    found = {each["worker"]: each for each in printed("replay", changing, "--at", 2, "--diff", changing)}
    figures = {"before": 3, "after": 4, "gained": 2, "lost": 1, "moved": 1}
    examples = {"gained_examples": [7, 8], "lost_examples": [1]}
    moved = [{"sequence_hash": 2, "before": ["GPU", "CPU_PINNED"], "after": ["CPU_PINNED"]}]
    assert found["engine-2"] | figures | examples | {"moved_examples": moved} == found["engine-2"]
    done = invoke("replay", changing, "--at", 2, "--diff", changing)
    assert done.stdout.splitlines() == [
        "worker    before  after  gained  lost  moved",
        "engine-2       3      4       2     1      1",
        "1 worker stream without a difference",
        "engine-2 gained, for example: 7, 8",
        "engine-2 lost, for example: 1",
        "engine-2 moved, for example: 2 (gpu+cpu -> cpu)",
    ]
    assert "after 2 records" in done.stderr
    assert invoke("replay", changing, "--diff", changing).stdout == "no difference\n"


def test_two_logs_differ_by_the_workers_that_one_lacks(changing: Path, tmp_path: Path) -> None:
    assert invoke("log", "slice", changing, tmp_path / "one", "--worker", "engine-2").exit_code == 0
    found = printed("replay", tmp_path / "one", "--diff", changing)
    facts = [(each["worker"], each["gained"], each["lost"]) for each in found]
    assert facts == [("engine-10", 2, 0), ("engine-2", 0, 0)]


def test_a_service_that_follows_a_log_equals_its_end_and_differs_from_earlier_moments(
    changing: Path, tmp_path: Path
) -> None:
    with ServiceProcess(tmp_path, KVSIGHT_EVENT_LOG_DIR=changing) as service:
        service.wait_until_ready()
        assert invoke("replay", changing, "--diff", service.url).stdout == "no difference\n"
        done = invoke("replay", changing, "--diff", service.url, "--at", 2)
    assert "engine-2 gained, for example: 7, 8" in done.stdout


def test_a_dump_of_several_block_sizes_has_the_names_of_its_streams(changing: Path) -> None:
    def part(block_size: int, worker: str, page: int, tier: str) -> dict[str, Any]:
        data = {"stored": {"parent_hash": None, "blocks": [{"block_hash": page}]}}
        event = {"event_id": 0, "data": data, "dp_rank": 0}
        return {"block_size": block_size, "events": [{"worker_id": worker, "storage_tier": tier, "event": event}]}

    dump = {"m:default:4": part(4, "engine-10", 1, "device"), "m:default:16": part(16, "x", 2**64 - 1, "disk")}
    found = diff(holdings_of(Timeline(changing).at()), holdings_of_dump(dump))
    facts = [(each.worker, each.gained, each.lost) for each in found]
    assert facts == [("engine-10", 0, 1), ("engine-2", 0, 4), ("x", 1, 0)]
    assert {(each.model, each.tenant) for each in found} == {("m", "default")}
    with pytest.raises(InvalidValueError, match="GET /dump"):
        holdings_of_dump({"m:default": {"block_size": 4, "events": [{}]}})


# --- damage, and key frames -----------------------------------------------------------------------------------------


@pytest.fixture
def segmented(tmp_path: Path) -> Path:
    """A log of many small files."""
    stream = Stream("w")
    return write_log(tmp_path / "log", [stream.batch(stored((0, [page])), now=1000 + page) for page in PAGES], 500)


def test_the_first_replay_of_a_large_log_writes_its_key_frames(
    segmented: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = segmented
    before = printed("replay", log)
    assert list(log.glob("*.kvframe")) == []
    monkeypatch.setattr(reading, "LARGE_BYTES", 100)
    with monkeypatch.context() as patch:
        full_disk = Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr(log_indexer, "save_frame", full_disk)
        done = invoke("replay", log, "--json")
    assert (json.loads(done.stdout), full_disk.called) == (before, True)
    assert "No space left on device" in done.stderr
    assert printed("replay", log) == before
    assert list(log.glob("*.kvframe")) != []


def test_the_sound_part_of_a_damaged_log_is_replayed_and_explained(tmp_path: Path) -> None:
    scene, truth = planted("evicted", 204)
    log = write_log(tmp_path / "log", scene.records)
    (segment,) = segments(log)
    flip(segment, 100)  # inside the first record, which is noise
    words = ("explain", log, "--prompt", "-", "--worker", VICTIM, *at(scene), "--json")
    explained = invoke(*words, stdin=json.dumps(scene.body))
    replayed = invoke("replay", log, "--at", 20)
    for done in (explained, replayed):
        assert done.exit_code == 1
        assert f"damaged: {segment}: a record's checksum is wrong at byte 24, record 0" in done.stderr
    assert msgspec.json.decode(explained.stdout, type=Explanation).workers[0].cause == truth.cause
    assert "after 19 records" in replayed.stderr


@pytest.mark.parametrize(
    "words",
    [
        *("replay LOG", "replay LOG --json", "replay LOG --diff LOG", "explain LOG --prompt -", "log info LOG"),
        *("tail --log LOG --from 0", "log export LOG --parquet new"),
    ],
)
def test_a_log_of_which_nothing_can_be_read_is_damaged_and_not_empty(words: str, tmp_path: Path) -> None:
    segment = tmp_path / f"{0:020}.kvlog"
    segment.write_bytes(b"noise" * 1000)
    done = invoke(*words.replace("LOG", str(tmp_path)).split(), stdin='{"model_name": "m", "token_ids": [1]}')
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"damaged: {segment}: ")
    assert "the log is empty" not in invoke("audit", tmp_path).stdout


def test_key_frames_of_other_settings_are_a_warning_or_damage_if_the_log_begins_late(
    segmented: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LogIndexer(segmented, frame_cost=500).advance()
    assert invoke("log", "slice", segmented, tmp_path / "tail", "--from", "10").exit_code == 0
    monkeypatch.setenv("KVSIGHT_MAX_PAGES", "1000")
    whole, late = invoke("replay", segmented), invoke("replay", tmp_path / "tail")
    assert (whole.exit_code, late.exit_code) == (0, 1)
    assert "warning: " in whole.stderr
    assert "made with other settings" in whole.stderr
    assert "damaged: " in late.stderr
    assert "warning: " not in late.stderr


# --- explain, and logs that begin late ------------------------------------------------------------------------------


def at(scene: Any) -> list[str]:
    return [] if scene.until is None else ["--at", f"@{scene.until.time_s}"]


def test_the_true_cause_is_printed(tmp_path: Path) -> None:
    scene, truth = planted("not_known_yet", 200)
    words = ["explain", write_log(tmp_path / "log", scene.records), "--prompt", "-", *at(scene)]
    query = json.dumps(scene.body)
    found = msgspec.convert(printed(*words, "--worker", VICTIM, stdin=query), Explanation, strict=False)
    (worker,) = found.workers
    check_truth(worker, truth)
    table, _, sentences = invoke(*words, stdin=query).stdout.partition("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    (row,) = (line for line in table.splitlines() if line.startswith(VICTIM))
    assert truth.cause.replace("_", " ") in row
    assert worker.findings[0].text in sentences


@pytest.fixture
def late(tmp_path: Path) -> Path:
    """Two workers store a prompt page by page. The first half of the records is deleted."""
    streams = [Stream("w-0"), Stream("w-1")]
    records = [stream.batch(stored((page - 1, [page])), now=1.7e9 + page) for page in PAGES for stream in streams]
    write_late_log(tmp_path / "log", records, len(PAGES))
    (tmp_path / "prompt.json").write_text(json.dumps({"model_name": "m", "seq_hashes": [*PAGES, 999]}))
    return tmp_path / "log"


def test_explain_and_audit_agree_with_a_replay_of_a_late_log(late: Path) -> None:
    views = printed("replay", late)
    assert [(view["worker"], view["state"], view["GPU"]) for view in views] == [
        ("w-0", "live", 20),
        ("w-1", "live", 20),
    ]
    workers = printed("explain", late, "--prompt", late.parent / "prompt.json")["workers"]
    facts = [(each["state"], each["held"]["gpu"], each["cause"]) for each in workers]
    assert facts == [("live", 20, "never_stored")] * 2
    assert "was not held when the log begins, nor stored since" in workers[0]["findings"][0]["text"]
    report = printed("audit", late)
    assert report["verdict"] == "No fault found: 2 streams, every batch arrived, every digest matches."
    streams = [(each["gaps"], each["digest_mismatches"], each["pages_held"]) for each in report["streams"]]
    assert streams == [(0, 0, 20)] * 2
    assert (report["pages"]["stored"], report["orphans"]) == ([20, 0, 0, 0], 0)
    assert [(each["pages"], each["stores"], each["workers"]) for each in report["hottest"]] == [(20, 2, 2)]


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_without_the_key_frame_one_line_says_that_the_log_begins_late(late: Path, fault: str) -> None:
    (frame,) = late.glob(f"{len(PAGES):020d}.kvframe")
    frame.write_bytes(frame.read_bytes()[:-1]) if fault == "damaged" else frame.unlink()
    code, prompt = (1 if fault == "damaged" else 0), late.parent / "prompt.json"
    moment = ("--at", len(PAGES) + 2)
    for words in (("replay", late), ("replay", late, *moment, "--diff", late), ("explain", late, "--prompt", prompt)):
        done = invoke(*words)
        lines = [line for line in done.stderr.splitlines() if "begins late" in line]
        assert lines == list(dict.fromkeys(lines)) != [], done.output
        assert "the records before 20 are deleted" in lines[0]
        assert (done.exit_code, f"damaged: {frame}" in done.stderr) == (code, code == 1)
    workers = printed("explain", late, "--prompt", prompt, code=code)["workers"]
    assert [each["cause"] for each in workers] == ["before_the_log"] * 2
    report = printed("audit", late, code=code)
    assert [each["kind"] for each in report["findings"]][-1:] == ["before the log"]
    assert [(each["gaps"], each["digest_mismatches"]) for each in report["streams"]] == [(0, 0)] * 2
    assert (str(frame) in str(report["damage"])) == (code == 1)


# --- times that no calendar has -------------------------------------------------------------------------------------


def test_every_command_shows_a_time_that_no_calendar_has_as_a_number(tmp_path: Path) -> None:
    stream, shown = Stream("w"), f"@{2**62 / 1000:g}"
    records = [stream.batch(stored((page - 1, [page])), now=1.7e9 + page) for page in range(1, 6)]
    records[3] = records[3]._replace(timestamp_ms=2**62)
    log = write_log(tmp_path / "log", records)
    query = json.dumps({"model_name": "m", "seq_hashes": [1, 2, 3, 4, 999]})
    for words in ("replay", "replay --at 4", "explain --prompt -", "log info", f"replay --at 2 --to 5 --diff {log}"):
        done = invoke(*words.split(), log, stdin=query)
        assert done.exit_code in (0, 1), done.output  # 1: `explain` found what is not held, and `--diff` a difference
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        assert shown in done.output
    for seconds in (2.0**62, -(2.0**62), 1e13, float("inf")):
        assert local_time(seconds) == utc_text(seconds) == f"@{seconds:g}"
    assert RecordLine(time_ms=2**62, kinds=("rejected",), reason="no batch").line().startswith(f"{shown}  ")
