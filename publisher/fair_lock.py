"""A lock that whoever waits for it gets next."""

from __future__ import annotations

import threading


class FairLock:
    """For `with`, as `threading.Lock`, which somebody who takes it again and again would hardly ever let others have.

    A turnstile: who waits for the lock holds the turnstile meanwhile, and who comes back has to pass that first.
    """

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turnstile:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
