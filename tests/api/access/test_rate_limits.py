"""`RateLimit`: a bound on requests in a second."""

from __future__ import annotations

import pytest

from api.access.rate_limits import RateLimit


class Clock:
    """Seconds that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def num_permitted(limit: RateLimit, tries: int = 100) -> int:
    """Send requests at one instant. Returns how many are permitted."""
    for sent in range(tries):
        if limit.wait_s():
            return sent
        limit.note()
    return tries


@pytest.mark.parametrize(("per_s", "at_once"), [(5.0, 5), (1.0, 1), (0.5, 1), (7.3, 7)])
def test_a_seconds_requests_are_permitted_at_once_and_then_by_and_by(per_s: float, at_once: int) -> None:
    clock = Clock()
    limit = RateLimit(per_s, clock)
    assert num_permitted(limit) == at_once
    wait_s = limit.wait_s()
    assert 0.0 < wait_s <= 1.0 / per_s + 1e-6
    clock.now += wait_s
    assert num_permitted(limit) == 1
    clock.now += 1000.0
    assert num_permitted(limit) == at_once
