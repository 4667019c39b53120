"""Repeated warnings are logged at a limited rate."""

from __future__ import annotations

import logging

import pytest

from kv_events.runtime.rate_limited_logger import RateLimitedLogger


def test_each_kind_of_warning_is_logged_once_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLogger(logging.getLogger("engines"), "engine w")
    for number in range(3):
        limited.warning("batch %d is lost", number)
    limited.warning("no connection")
    assert caplog.messages == ["engine w: batch 0 is lost", "engine w: no connection"]
    assert {record.name for record in caplog.records} == {"engines"}
