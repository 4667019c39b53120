"""Settings of a publisher."""

import os
from typing import Any

import pytest

from kv_events.errors import InvalidValueError
from kv_events.streams import StreamId
from publisher import PublisherSettings
from publisher.sinks import create_sink
from publisher.sinks.file import FileSink
from publisher.sinks.kafka import KafkaSink
from publisher.sinks.zmq import ZmqSink

GOOD: dict[str, Any] = {"model": "m", "worker": "w", "block_size": 16}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVSIGHT_")]:
        monkeypatch.delenv(name)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MODEL", "llama"), ("WORKER", "w-3"), ("BLOCK_SIZE", "64")):
        monkeypatch.setenv(f"KVSIGHT_{name}", value)
    settings = PublisherSettings()
    assert settings.stream == StreamId("llama", "default", "w-3", 0)
    assert settings.block_size == 64


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"block_size": 0}, "KVSIGHT_BLOCK_SIZE"),
        ({"block_size": "many"}, "KVSIGHT_BLOCK_SIZE"),
        ({"worker": ""}, "KVSIGHT_WORKER"),
        ({"model": "é" * 200}, "KVSIGHT_MODEL"),
        ({"tenant": "\ud800"}, "KVSIGHT_TENANT"),
        ({"dp_rank": -1}, "dp_rank"),  # without a variable
        ({"compression": "gzip"}, "compression"),
        ({"queue_pages": 0}, "queue_pages"),
        ({"batch_bytes": 10**7}, "batch_bytes"),
        ({"heartbeat_s": 0}, "heartbeat_s"),
        ({"block_size": 4096, "batch_bytes": 8192, "with_tokens": True}, "batch_bytes"),  # less than a page of tokens
    ],
)
def test_a_bad_value_is_refused_naming_its_variable_or_its_own_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{named}: got "):
        PublisherSettings(**{**GOOD, **values})


def test_a_missing_value_is_named() -> None:
    with pytest.raises(InvalidValueError, match="KVSIGHT_WORKER: got None"):
        PublisherSettings(model="m", block_size=16)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        PublisherSettings(**GOOD).worker = "other"  # type: ignore[misc]


def test_the_sink_is_chosen_by_settings(tmp_path: Any) -> None:
    assert isinstance(create_sink(PublisherSettings(**GOOD, kafka="localhost:9092")), KafkaSink)
    assert isinstance(create_sink(PublisherSettings(**GOOD, event_log_dir=tmp_path)), FileSink)
    assert isinstance(create_sink(PublisherSettings(**GOOD, zmq="tcp://*:5557", with_tokens=True)), ZmqSink)
    wrong: list[dict[str, Any]] = [
        {},
        {"kafka": "localhost:9092", "event_log_dir": tmp_path},
        {"kafka": "h:1", "zmq": "tcp://*:1"},
    ]
    for both_or_none in wrong:
        with pytest.raises(InvalidValueError, match="KVSIGHT_KAFKA / KVSIGHT_EVENT_LOG_DIR"):
            create_sink(PublisherSettings(**GOOD, **both_or_none))
