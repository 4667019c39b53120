"""Mooncake traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kv_events.errors import InvalidValueError
from simulation import MooncakeTrace

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}


def _trace(folder: Path, *lines: str) -> MooncakeTrace:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return MooncakeTrace(path)


def _line(**changes: object) -> str:
    return json.dumps(GOOD | changes)


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    (request,) = _trace(tmp_path, _line())
    assert request.arrival_s == 1.5
    assert request.token_ids.dtype == np.uint32
    assert len(request.token_ids) == 600
    assert len(request.output_tokens) == 0


def test_equal_hash_ids_stand_for_equal_tokens(tmp_path: Path) -> None:
    one, other = _trace(tmp_path, _line(input_length=1024), _line(input_length=900, hash_ids=[4, 8]))
    np.testing.assert_array_equal(one.token_ids[:512], other.token_ids[:512])


def test_different_hash_ids_share_no_page_at_any_place(tmp_path: Path) -> None:
    ids = [*range(2000), 2**53 - 1, 2**53 - 2]
    (request,) = _trace(tmp_path, _line(hash_ids=ids, input_length=512 * len(ids)))
    pages = request.token_ids.reshape(-1, 16)
    assert len(np.unique(pages, axis=0)) == len(pages)


def test_every_pass_gives_the_same_requests(tmp_path: Path) -> None:
    trace = _trace(tmp_path, _line(), _line(hash_ids=[5, 6]))
    for one, other in zip(trace, trace, strict=True):
        assert one.session == other.session
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    trace = _trace(tmp_path, _line(timestamp=2000), _line(timestamp=1000))
    assert [request.arrival_s for request in trace] == [1.0, 2.0]


def test_gzip_is_read_like_plain_text_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(f"{_line()}\n\n{_line()}\n".encode()))
    assert len(MooncakeTrace(path)) == 2


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"timestamp": -1}, "timestamp", "-1"),
        ({"timestamp": "soon"}, "timestamp", "soon"),
        ({"timestamp": True}, "timestamp", "True"),
        ({"input_length": 0}, "input_length", "0"),
        ({"input_length": 1025}, "input_length", "1025"),
        ({"input_length": 2.5}, "input_length", "2.5"),
        ({"output_length": -3}, "output_length", "-3"),
        ({"output_length": None}, "output_length", "None"),
        ({"hash_ids": 17}, "hash_ids", "17"),
        ({"hash_ids": [1, -2]}, r"hash_ids\[1\]", "-2"),
        ({"hash_ids": [2**53, 2]}, r"hash_ids\[0\]", str(2**53)),
        ({"hash_ids": [1, "x"]}, r"hash_ids\[1\]", "x"),
        ({"hash_ids": []}, "input_length", "600"),
    ],
)
def test_a_bad_field_is_refused_with_line_name_and_value(
    tmp_path: Path, changes: dict[str, object], field: str, value: str
) -> None:
    with pytest.raises(InvalidValueError, match=rf"line 3: {field}: got '?{value}"):
        _trace(tmp_path, _line(), "", _line(**changes))


def test_a_missing_field_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"line 1: hash_ids: got 'nothing'"):
        _trace(tmp_path, json.dumps({k: v for k, v in GOOD.items() if k != "hash_ids"}))


@pytest.mark.parametrize(
    "line", ["{", "[1]", "\udce4".encode("utf-8", "surrogateescape").decode("latin-1"), "null", "[" * 100_000]
)
def test_a_line_that_is_no_object_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidValueError, match="line 2"):
        _trace(tmp_path, _line(), line)


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(_line().encode(), mtime=0)[:-12]])
def test_a_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)  # messages cut long paths
    path = Path("trace.jsonl.gz")
    path.write_bytes(content)
    with pytest.raises(InvalidValueError, match=r"trace\.jsonl\.gz"):
        MooncakeTrace(path)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"none\.jsonl"):
        MooncakeTrace(tmp_path / "none.jsonl")
    with pytest.raises(InvalidValueError, match="at least one request"):
        _trace(tmp_path, "")


def test_the_real_trace_is_read_whole(trace_path: Path) -> None:
    with gzip.open(trace_path) as file:
        lengths = [json.loads(line)["input_length"] for line in file]
    trace = MooncakeTrace(trace_path)
    assert len(trace) == len(lengths)
    assert sum(len(request.token_ids) for request in trace) == sum(lengths)
