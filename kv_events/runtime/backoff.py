"""Pauses between attempts: exponential backoff with jitter."""

import asyncio
import random

_random = random.SystemRandom()


def pause_s(attempt: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after attempt 0, 1, ...: `first_s`, doubled per attempt, at most `longest_s`.

    Each pause is shortened at random by up to a half, so that clients of one server do not return all at once.
    """
    return min(longest_s, first_s * 2.0 ** min(attempt, 64)) * _random.uniform(0.5, 1.0)


class Backoff:
    """The pauses of one retry loop. Belongs to one task."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.failed_attempts = 0
        """Since the last success."""

    async def pause(self) -> None:
        """Wait after a failed attempt."""
        pause = pause_s(self.failed_attempts, self._first_s, self._longest_s)
        self.failed_attempts += 1
        await asyncio.sleep(pause)

    def reset(self) -> None:
        """Begin again with the first pause, after an attempt that succeeded."""
        self.failed_attempts = 0
