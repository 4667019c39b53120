"""Up to which time a publisher's records tell what the worker held, while changes wait for later records."""

from __future__ import annotations

from collections import deque


class Backlog:
    """Times of the changes that wait. They are taken in the order of their arrival. Times are the caller's."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._marks: deque[tuple[int, float]] = deque()  # total of changes by a time, and that time; both grow
        self._as_of = 0.0

    def look(self, num_queued: int, now: float) -> None:
        """Note how many changes wait. The next ones come later."""
        self._marks.append((self._num_taken + num_queued, now))

    def take(self, number: int) -> float:
        """Note that the oldest changes were taken. Returns a time before which all changes have been taken."""
        self._num_taken += number
        while self._marks and self._marks[0][0] <= self._num_taken:
            self._as_of = self._marks.popleft()[1]
        return self._as_of

    def end(self, now: float) -> None:
        """Note that no change from before this time waits."""
        self._marks.clear()
        self._as_of = now
