"""Warnings that one bad peer could repeat without end, limited to two a minute for each kind."""

import logging
import math
import time

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
