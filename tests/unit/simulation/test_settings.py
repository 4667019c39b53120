"""Settings of a simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_events.errors import InvalidValueError
from kv_events.kafka.settings import KafkaSettings
from simulation import SimulationSettings, simulate


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("workers", {"workers": 0}),
        ("page_size", {"page_size": 0}),
        ("capacity_tokens", {"capacity_tokens": 100, "page_size": 64}),
        ("capacity_tokens", {"capacity_tokens": 0}),
        ("cache", {"cache": "best"}),
        ("host_ratio", {"cache": "hiradix", "host_ratio": 0.9}),
        ("disk_ratio", {"cache": "hiradix", "disk_ratio": 0.0}),
        ("groups", {"cache": "hiradix", "groups": True}),
        ("event_log_dir", {"kafka": KafkaSettings(kafka="localhost:9092"), "event_log_dir": Path("log")}),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, values: dict[str, object]) -> None:
    with pytest.raises(InvalidValueError, match=field):
        SimulationSettings(**values)  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused_before_anything_runs() -> None:
    with pytest.raises(InvalidValueError, match="policy: got 'best'"):
        simulate([], SimulationSettings(), ["random", "best"])
