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
        ("worker", {"worker": "\udcff"}),
        ("topic", {"topic": "\udcff"}),
        ("cache_salt", {"cache_salt": "\udcff"}),
        ("num_ranks", {"num_ranks": 0}),
        ("dp_rank", {"dp_rank": -1}),
        ("block_size", {"block_size": 0}),
        ("worker", {"worker": None, "model": None, "republish": "tcp://*:1"}),
        ("republish", {"republish_replay": "tcp://*:1"}),
        ("republish", {"republish": "nowhere"}),
        ("republish", {"republish": "tcp://*:65535", "num_ranks": 2}),
    ],
)
def test_a_bad_value_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError) as caught:
        EngineSettings(**{**GOOD, **fields})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"engines": [{"worker": "w"}]}', "engines[0].endpoint: got None, expected a value"),
        ('{"engines": [{"worker": "w", "model": "m", "endpoint": "x"}]}', "engines[0].endpoint: got 'x'"),
        (
            '{"engines": [{"worker": "w", "model": "m", "endpoint": "tcp://h:1", "eagel": 1}]}',
            "engines[0]: got 'eagel', expected a known field; the nearest name is eagle",
        ),
        (
            '{"engines": [{"worker": "w", "endpoint": "tcp://h:1", "block_size": "16x"}]}',
            "engines[0].block_size: got '16x', expected an integer",
        ),
        (
            '{"engines": [{"worker": "w", "endpoint": "tcp://h:1", "capacity": {"gpu": "x"}}]}',
            "engines[0].capacity[...]: got {'gpu': 'x'}, expected an integer",
        ),
        ('{"engines": [{"cache_salt": 1}]}', "engines[0].cache_salt: got 'int', expected text"),
        ('{"engines": ["w=tcp://h:1,cache_salt=s"]}', "engines[0]: got 'str', expected a table"),
        ('{"worker": 3}', "e.json: got 'worker', expected a known field; the nearest name is engines"),
        ('{"engines": 3}', "e.json: engines: got 'int', expected a list"),
        ('{"engines": [', "truncated"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=r"e\.json") as caught:
        read_engines(path)
    assert complaint in str(caught.value)


OF_ENGINE = "worker=w,model=m,endpoint=tcp://h:1"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "engine: got '', expected NAME=tcp://HOST:PORT"),
        ("worker", "engine: got 'worker', expected NAME=tcp://HOST:PORT"),
        ("tcp://localhost:5557", "engine: got 'tcp://localhost:5557', expected NAME=tcp://HOST:PORT"),
        ("user:SECRET@h:1", "engine: got '...@h:1', expected NAME=tcp://HOST:PORT"),
        ("e5=localhost:5557,model=m", "engine: endpoint: got 'localhost:5557', expected tcp://HOST:PORT"),
        ("e5=tcp://h:99999,model=m", "endpoint: got 'tcp://h:99999', expected .* with a port in 1 .. 65535"),
        ("worker=a,worker=b", "worker, worker"),
        (f"{OF_ENGINE}, worker=v", "worker, model, endpoint, worker"),
        (f"{OF_ENGINE},dp_rank=x", "engine: dp_rank: got 'x', expected an integer"),
        (f"{OF_ENGINE},eagle=x", "engine: eagle: got 'x', expected true or false"),
        ("worker=w,model=m", "engine: endpoint: got None, expected a value"),
        ("a=b", "got 'a', expected NAME=tcp://HOST:PORT, or a field of an engine; the nearest name is "),
        ("w=tcp://h:1,model=m,metrics=1", "got 'metrics', .* the nearest name is metrics_url$"),
        ("w=tcp://h:1,model=m,repaly=1", "got 'repaly', .* the nearest name is replay$"),
        (f"{OF_ENGINE},cache_salt=SECRET,port=1", "got 'port'"),
        (f"{OF_ENGINE},cache_salt=a,SECRET", "cache_salt, 6 characters without ="),
        (f"{OF_ENGINE},cache_salt=a,cache_salt=SECRET", "cache_salt, cache_salt"),
        (f"{OF_ENGINE},cache_salt=" + 50 * "SECRET", "cache_salt: got '300 characters'"),
        (f"{OF_ENGINE},cache_salt=SECRET,dp_rank=x", "dp_rank"),
        (f"{OF_ENGINE},cache_salt=SECRET\udcff", "engine: cache_salt: got '7 characters', expected at most"),
        (f"{OF_ENGINE},ranks=\udcff", "expected text that UTF-8 can hold"),
        (f"{OF_ENGINE},dp_rank=1e400", "engine: dp_rank: got '.*out of range'"),
        (f"{OF_ENGINE},eagle={'9' * 5000}", "engine: eagle: got"),
        ("tcp://user:SECRET\nSECRET@h:1", "got '...@h:1'"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_and_no_message_shows_a_salt(text: str, complaint: str) -> None:
    with pytest.raises(InvalidValueError, match=complaint) as caught:
        parse_engine(text)
    assert "SECRET" not in str(caught.value)
