"""Numbers of publishers' incarnations."""

from __future__ import annotations

import threading
import time

_lock = threading.Lock()  # guards the newest one
_newest = 0


def next_epoch() -> int:
    """Nanoseconds since 1970; where the clock was set back, one more than the newest that this process has had.

    A view takes the higher epoch for the newer incarnation, whatever the clock did between them. Any thread.
    """
    global _newest
    with _lock:
        _newest = max(_newest + 1, time.time_ns())
        return _newest
