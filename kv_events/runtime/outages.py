"""Outages of a server that several parts of a process use: one log line at the beginning, one at the end."""

import logging
import time
from datetime import UTC, datetime


class Outage:
    """Whether something is unavailable, since when and why. Belongs to one event loop.

    It begins with the first user that fails, and ends when no user fails any longer.
    """

    def __init__(self, logger: logging.Logger, down: str, up: str) -> None:
        """down, up: the beginnings of the two lines, such as `log unreadable` and `log readable`."""
        self.since: float | None = None
        """Seconds since 1970. None: available."""
        self._logger = logger
        self._down, self._up = down, up
        self._reason = ""
        self._failing: set[str] = set()

    def __str__(self) -> str:
        """Text for people, or "" while available."""
        if self.since is None:
            return ""
        return f"{self._down} since {datetime.fromtimestamp(self.since, UTC):%Y-%m-%dT%H:%M:%SZ}: {self._reason}"

    @property
    def seconds(self) -> float:
        """Duration so far; 0 while available."""
        return 0.0 if self.since is None else max(0.0, time.time() - self.since)

    def is_failing(self, user: str) -> bool:
        """Return whether the newest attempt of a user failed."""
        return user in self._failing

    def note_failure(self, reason: object, user: str = "", began: float | None = None) -> None:
        """Note a failed attempt. began: beginning of the outage in seconds since 1970, if it was before now."""
        self._failing.add(user)
        if self.since is None:
            self.since = time.time() if began is None else began
            self._reason = str(reason)
            self._logger.warning("%s", str(self))  # not later, when it may have ended

    def forget(self, user: str) -> None:
        """Forget a user that has stopped. Without another one, nothing is known any longer."""
        self._failing.discard(user)
        if not self._failing:
            self.since = None

    def note_success(self, user: str = "") -> None:
        """Note a successful attempt."""
        self._failing.discard(user)
        if self.since is not None and not self._failing:
            self._logger.warning("%s again after %.1f s", self._up, self.seconds)
            self.since = None
