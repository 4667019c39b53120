"""Engines that are configured in files and flags."""

from pathlib import Path
from typing import Any

import pytest

from bridge.settings import EngineSettings, parse_engine, read_engines
from kv_events.errors import InvalidValueError

GOOD: dict[str, Any] = {"worker": "w", "model": "m", "endpoint": "tcp://h:5557"}


def test_toml_and_json_name_the_same_engines(tmp_path: Path) -> None:
    toml, json = tmp_path / "e.toml", tmp_path / "e.json"
    toml.write_text('[[engines]]\nworker = "w"\nmodel = "m"\nendpoint = "tcp://h:5557"\nnum_ranks = 2\n')
    json.write_text('{"engines": [{"worker": "w", "model": "m", "endpoint": "tcp://h:5557", "num_ranks": 2}]}')
    assert read_engines(toml) == read_engines(json) == [EngineSettings(**GOOD, num_ranks=2)]


def test_a_flag_names_an_engine() -> None:
    assert parse_engine("worker=w, model=m,endpoint=tcp://h:5557,dp_rank=2,bind=false") == EngineSettings(
        **GOOD, dp_rank=2, bind=False
    )


def test_ranks_have_addresses_of_their_own() -> None:
    second = EngineSettings(**GOOD, replay_endpoint="tcp://h:6000", num_ranks=3, dp_rank=4).of_rank(2)
    assert second == EngineSettings(
        worker="w", model="m", endpoint="tcp://h:5559", replay_endpoint="tcp://h:6002", dp_rank=6
    )


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("endpoint", {"endpoint": "h:5557"}),
        ("endpoint", {"endpoint": "tcp://h"}),
        ("endpoint", {"endpoint": "http://h:1"}),
        ("endpoint", {"endpoint": "tcp://h:65535", "num_ranks": 2}),
        ("replay_endpoint", {"replay_endpoint": "tcp://*:5558"}),
        ("model", {"model": None}),
        ("worker", {"worker": ""}),
        ("worker", {"worker": None, "num_ranks": 2}),
        ("tenant", {"tenant": "t" * 300}),
        ("num_ranks", {"num_ranks": 0}),
        ("dp_rank", {"dp_rank": -1}),
        ("block_size", {"block_size": 0}),
    ],
)
def test_a_bad_value_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError) as caught:
        EngineSettings(**{**GOOD, **fields})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"engines": [{"worker": "w"}]}', "endpoint"),
        ('{"engines": [{"worker": "w", "model": "m", "endpoint": "x"}]}', "endpoint: got 'x'"),
        ('{"engines": [{"worker": "w", "model": "m", "endpoint": "tcp://h:1", "port": 1}]}', "port"),
        ('{"engines": 3}', "array"),
        ('{"engines": [', "truncated"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=r"e\.json") as caught:
        read_engines(path)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "worker", "worker=a,worker=b", "worker=w,model=m,endpoint=tcp://h:1,dp_rank=x", "a=b"]
)
def test_a_flag_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError):
        parse_engine(text)


@pytest.mark.parametrize(
    "text",
    [
        "worker=w,model=m,endpoint=tcp://h:1,cache_salt=SECRET,port=1",
        "worker=w,model=m,endpoint=tcp://h:1,cache_salt=a,SECRET",
        "worker=w,model=m,endpoint=tcp://h:1,cache_salt=a,cache_salt=SECRET",
        "worker=w,model=m,endpoint=tcp://h:1,cache_salt=" + 50 * "SECRET",
        "worker=w,model=m,endpoint=tcp://h:1,cache_salt=SECRET,dp_rank=x",
    ],
)
def test_no_message_shows_a_salt(text: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        parse_engine(text)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(("field", "meant"), [("metrics", "metrics_url"), ("repaly", "replay")])
def test_a_misspelt_field_is_named_with_the_one_that_is_meant(field: str, meant: str) -> None:
    with pytest.raises(InvalidValueError, match=f"got '{field}', .* the nearest name is {meant}$"):
        parse_engine(f"w=tcp://h:1,model=m,{field}=1")


def test_a_field_is_named_once_whatever_spaces_are_around_it() -> None:
    with pytest.raises(InvalidValueError, match="worker"):
        parse_engine("worker=w,model=m,endpoint=tcp://h:1, worker=v")
