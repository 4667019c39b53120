"""Epoch numbers."""

from __future__ import annotations

import time

import pytest

from publisher.publisher import next_epoch


def test_a_later_incarnation_has_a_higher_number_whatever_the_clock_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time_ns()
    first = next_epoch()
    assert before <= first <= time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: before - 10**12)
    assert next_epoch() == first + 1
    monkeypatch.setattr(time, "time_ns", lambda: first + 10**6)
    assert next_epoch() == first + 10**6
