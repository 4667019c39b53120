"""What is wrong with an engine, said now and then in the log; the counters have it all."""

from __future__ import annotations

import logging
import math
import time

log = logging.getLogger(__name__)

_INTERVAL_S = 30.0


class Complaints:
    """Of one engine, each kind for itself at most twice a minute. Any thread."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._said_at: dict[str, float] = {}  # by text, of which there is a fixed number

    def say(self, text: str, *facts: object, error: Exception | None = None) -> None:
        """text: a constant, with places for the facts; texts from outside are to be shortened."""
        now = time.monotonic()
        if now >= self._said_at.get(text, -math.inf) + _INTERVAL_S:
            self._said_at[text] = now
            log.warning("engine %s: " + text, self._engine, *facts, exc_info=error)
