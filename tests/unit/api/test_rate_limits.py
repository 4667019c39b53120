"""`RateLimits`: bounds on requests in a second, of one process or of several."""

from __future__ import annotations

import pytest

from api.rate_limits import RateLimit, RateLimits, SharedCells


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


def test_processes_share_the_bound_with_a_name() -> None:
    cells = SharedCells()
    one, other = RateLimits(cells), RateLimits(cells)
    first, second, third = one.limit("a", 1e-3), other.limit("a", 1e-3), other.limit("b", 1e-3)
    assert num_permitted(first) == 1
    assert num_permitted(second) == 0
    assert num_permitted(third) == 1


def test_one_process_shares_nothing() -> None:
    limits = RateLimits()
    assert [num_permitted(limits.limit("a", 1e-3)) for _ in range(2)] == [1, 1]


def test_thousands_of_names_have_bounds_of_their_own() -> None:
    limits = RateLimits(SharedCells())
    assert {num_permitted(limits.limit(f"tenant {number}", 1e-3)) for number in range(5000)} == {1}
