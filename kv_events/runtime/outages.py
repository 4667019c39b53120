"""Log lines without end are limited: those of an outage to two, those that a bad peer causes to two a minute."""

import logging
import math
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
        self._failing.discard(user)
        if self.since is not None and not self._failing:
            self._logger.warning("%s again after %.1f s", self._up, self.seconds)
            self.since = None


_INTERVAL_S = 30.0


class RateLimitedLogger:
    """Logs each kind of warning at most once in 30 seconds. Counters keep the full number. Thread-safe."""

    def __init__(self, log: logging.Logger, subject: str) -> None:
        """subject: what all messages are about; they begin with it."""
        self._log = log
        self._subject = subject
        self._logged_at: dict[str, float] = {}  # by template; there is a fixed number of them

    def warning(self, template: str, *facts: object, error: Exception | None = None) -> None:
        """Log a warning unless one of the same template was logged less than 30 seconds ago.

        template: a constant, in the style of `logging`. facts: shorten those that come from outside. error: its
        traceback is logged, too.
        """
        now = time.monotonic()
        if now >= self._logged_at.get(template, -math.inf) + _INTERVAL_S:
            self._logged_at[template] = now
            self._log.warning("%s: " + template, self._subject, *facts, exc_info=error)
