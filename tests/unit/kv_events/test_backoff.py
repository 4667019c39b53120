"""Pauses between attempts."""

from __future__ import annotations

import asyncio

from kv_events.runtime.backoff import Backoff, pause_s


def test_pauses_double_up_to_the_longest_one_less_at_most_a_half() -> None:
    for attempt, full in enumerate([1.0, 2.0, 4.0, 5.0, 5.0]):
        drawn = [pause_s(attempt, 1.0, 5.0) for _ in range(100)]
        assert full / 2 <= min(drawn) < max(drawn) <= full
    assert pause_s(10_000, 1.0, 5.0) <= 5.0


async def test_a_success_begins_again_with_the_first_pause() -> None:
    backoff = Backoff(0.001, 60.0)
    async with asyncio.timeout(10):  # without the reset the 18 pauses add up to more than two minutes
        for _ in range(2):
            for _ in range(9):
                await backoff.pause()
            assert backoff.failed_attempts == 9
            backoff.reset()
