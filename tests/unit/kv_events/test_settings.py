"""The sources of settings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

from kv_events.errors import InvalidValueError
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.settings import KvsightSettings


class Settings(KvsightSettings):
    block_size: int
    tenant: str = "default"
    patience: float = Field(1.0, gt=0)


def test_variables_count_where_no_argument_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIGHT_TENANT", "t")
    monkeypatch.setenv("KVSIGHT_BLOCK_SIZE", "1")
    settings = Settings(block_size=2)
    assert (settings.block_size, settings.tenant) == (2, "t")


def test_variables_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIGHT_TENANT", "t")
    settings = Settings.ignoring_environment(block_size=2)
    assert (settings.block_size, settings.tenant) == (2, "default")
    with pytest.raises(InvalidValueError, match="KVSIGHT_BLOCK_SIZE: got 'x'"):
        Settings.ignoring_environment(block_size="x")


def test_a_constructor_argument_has_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATIENCE", "7")
    assert Settings(block_size=1).patience == 1.0
    assert Settings(block_size=1, patience=3.0).patience == 3.0
    with pytest.raises(InvalidValueError, match=r"^patience: got 0"):
        Settings(block_size=1, patience=0.0)


def test_a_flag_that_is_not_given_leaves_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIGHT_BLOCK_SIZE", "1")
    settings = Settings.from_flags(block_size=None, tenant="t")
    assert (settings.block_size, settings.tenant) == (1, "t")


@pytest.mark.parametrize(
    ("topics", "variable"),
    [
        ({"events_topic": "two words"}, "KVSIGHT_EVENTS_TOPIC"),
        ({"control_topic": ""}, "KVSIGHT_CONTROL_TOPIC"),
        ({"events_topic": "same", "control_topic": "same"}, "KVSIGHT_CONTROL_TOPIC"),
        ({"events_topic": "same", "decisions_topic": "same"}, "--decisions-topic"),
    ],
)
def test_topics_that_cannot_work_are_refused(topics: dict[str, str], variable: str) -> None:
    with pytest.raises(InvalidValueError, match=variable):
        KafkaSettings(**topics)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [({}, "PORT: got None, expected a value"), ({"port": "x"}, "PORT: got 'x', expected a valid integer")],
)
def test_a_bad_value_is_named_in_one_phrase(values: dict[str, Any], message: str) -> None:
    class Sized(KvsightSettings):
        port: int

    with pytest.raises(InvalidValueError, match=f"^KVSIGHT_{message}$"):
        Sized(**values)
