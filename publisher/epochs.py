"""Epochs of publishers."""

from __future__ import annotations

import threading
import time

_lock = threading.Lock()  # guards the newest epoch
_newest = 0


def next_epoch() -> int:
    """Return nanoseconds since 1970, or, if the clock was set back, one more than the newest epoch of this process.

    A view treats the higher epoch as the newer one, so epochs of a process always increase. Thread-safe.
    """
    global _newest
    with _lock:
        _newest = max(_newest + 1, time.time_ns())
        return _newest
