"""Tables of the command: nothing is cut, columns are left out by importance, orders are stable."""

import re
from typing import Any

import pytest

from kv_events.runtime.words import duration, names, natural_order, printable
from kvsight.cli.shared.answers import Asked, answer_lines
from kvsight.cli.shared.streams import StreamRow, streams_lines
from kvsight.cli.shared.tables import Column, table_lines
from kvsight.cli.simulate import report_lines
from simulation import PolicyReport, WorkerLoad

LONG = "w" * 90


def row(worker: str, *, pages: int = 1, medium: str = "GPU", state: str = "live", **more: Any) -> StreamRow:
    found = StreamRow("m", "default", 16, worker, 0, "", state, "", 12_000, {medium: pages})
    return found._replace(**more)


def held(tokens: int, **more: Any) -> dict[str, Any]:
    tiers = dict.fromkeys(("gpu", "cpu", "disk", "external", "longest_matched"), tokens)
    return {**tiers, "dp": {"0": tokens}, "state": "live", "age_ms": 100, **more}


def shown(instances: dict[str, Any], streams: list[StreamRow], tokens: int = 40) -> list[str]:
    asked = Asked.of({"model_name": "m", "token_ids": [1] * tokens})
    return list(answer_lines({"scores": {}, "instances": instances}, asked, streams, 80))


def test_a_table_leaves_out_the_least_important_columns_and_cuts_nothing() -> None:
    columns = [
        Column("worker", ["abcdefgh"]),
        Column("small", ["1"], is_number=True, rank=1),
        Column("reason", ["x" * 10], rank=2),
    ]
    assert list(table_lines(columns, 80))[1] == "abcdefgh      1  xxxxxxxxxx"
    assert list(table_lines(columns, 20)) == ["worker    small", "abcdefgh      1"]
    assert list(table_lines(columns, 4)) == ["worker", "abcdefgh"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("\ufeffw", r"\ufeffw"),
        ("\u3164", r"\u3164"),
        (" ", r"\x20"),
        ("w\U000e0100", r"w\U000e0100"),
        ("a b", "a b"),
        ("a\x1b[2Jb\n", r"a\x1b[2Jb\n"),
    ],
)
def test_names_can_be_seen_and_cannot_steer_the_terminal(name: str, text: str) -> None:
    assert printable(name) == text
    assert list(table_lines([Column("worker", [name])], 80)) == ["worker", text]


def test_words_are_readable() -> None:
    assert sorted(["w-10", "w-2", "a", "10", "9"], key=natural_order) == ["9", "10", "a", "w-2", "w-10"]
    assert [duration(ms) for ms in (0, 12_340, 600_000, 90_000_000)] == ["0.0 s", "12.3 s", "10 min", "25 h"]
    assert names([f"w{n}" for n in range(9)]) == "w0, w1, w2, w3, w4 and 4 more"


def test_a_query_says_who_was_asked_and_why_others_are_absent() -> None:
    streams = [row("a"), row("b", state="expired"), row("c", pages=0, reason="new"), row("d")]
    assert shown({"a": held(32)}, streams) == [
        "prompt of 40 tokens, 2 pages; asked 4 workers of model m, pages of 16 tokens",
        "worker  rank  gpu tokens  state  last heard",
        "a          0          32  live    0.1 s ago",
        "Tokens held on a tier include those on the faster tiers.",
        "b: expired, last heard 12.0 s ago",
        "c: holds no pages (new)",
        "d: does not hold the first page",
    ]


def test_a_query_that_no_worker_answers_says_why() -> None:
    streams = [row("a"), row("b", state="expired")]
    assert shown({}, streams)[1:] == [
        "No worker holds its first page.",
        "a: does not hold the first page",
        "b: expired, last heard 12.0 s ago",
    ]
    assert shown({}, streams, tokens=7)[:2] == [
        "7 tokens: less than one page of 16; asked 2 workers of model m, pages of 16 tokens",
        "a: the prompt is shorter than its pages of 16 tokens",
    ]
    assert shown({}, []) == ["prompt of 40 tokens; model m", "No worker holds any of it."]


def test_equal_workers_are_in_the_order_of_their_names() -> None:
    instances = {name: held(16) for name in ("w-10", "w-9", "w-1")} | {"z": held(32)}
    lines = shown(instances, [row(name) for name in instances])
    assert [line.split()[0] for line in lines[2:6]] == ["z", "w-1", "w-9", "w-10"]


def test_only_tiers_that_a_worker_has_are_shown() -> None:
    streams = [row("a", pages=2, medium="CPU_PINNED"), row("b", medium="DISK")]
    title = shown({"a": held(16, gpu=0)}, streams)[1]
    assert "cpu tokens  disk tokens" in title
    assert "gpu" not in title
    assert "external" not in title
    unknown = shown({"a": held(16, gpu=0), "b": held(16)}, [])[1]  # another indexer, without a list of workers
    assert "gpu tokens  cpu tokens  state" in unknown


def test_the_best_rank_is_shown() -> None:
    fields = held(16, dp={"0": 0, "1": 16, "2": 16}, matched_dp={"0": 16, "1": 16, "2": 16})
    lines = shown({"a": fields}, [row("a")])
    assert lines[1].split("  ")[1] == "best rank"
    assert lines[2].split()[1] == "1"


def test_an_answer_in_the_other_dialect_has_the_same_table() -> None:
    instance = {"longest_matched": 16, "GPU": 16, "CPU": 16, "DISK": 16, "EXTERNAL": 16, "DP": {"0": 16}}
    answer = {"default": {LONG: {**instance, "state": "live", "age_ms": 0}}}
    asked = Asked.of({"model": "m", "block_size": 16, "block_hash": [1, 2], "instance_id": LONG})
    lines = list(answer_lines(answer, asked, [row(LONG), row("other")], 80))
    assert lines[0] == "prompt of 2 pages; asked 1 worker of model m, pages of 16 tokens"
    assert lines[2].startswith(LONG)
    assert len(lines) == 4


def test_streams_are_listed_by_model_with_their_groups_and_reasons() -> None:
    rows = [
        row("w-10"),
        row("w-2", reason="gap", state="stale"),
        row("w-2", group="mamba"),
        row("x", model="n", tenant="t"),
    ]
    lines = list(streams_lines(rows, 80))
    assert lines[0] == "model m, pages of 16 tokens: 2 workers"
    assert lines[1].split() == ["worker", "rank", "group", "state", "last", "heard", "gpu", "pages", "reason"]
    assert [line.split()[0] for line in lines[2:5]] == ["w-2", "w-2", "w-10"]
    assert lines[2].endswith("gap")
    assert lines[6] == "model n of tenant t, pages of 16 tokens: 1 worker"


def test_a_simulation_has_a_row_for_each_policy_in_eighty_columns() -> None:
    loads = (WorkerLoad("w0", 100, 8_000_000, 0), WorkerLoad("w1", 1900, 32_000_000, 8_000_000, 1, 3))
    lines = list(report_lines([PolicyReport("round-robin", loads, 17, 12.34)]))
    assert lines[2].split("  ")[0] == "round-robin"
    assert re.split(r"\s{2,}", lines[2])[1:] == ["20.0%", "100/1000/1900", "8.0/16.0/24.0", "17", "3", "12.3 s"]
    assert max(map(len, lines)) <= 80
