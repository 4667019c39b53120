"""A fair lock: a waiting thread gets it next."""

from __future__ import annotations

import threading


class FairLock:
    """A lock for `with`. A thread that acquires a `threading.Lock` in a loop would hardly ever let others acquire it.

    It has a turnstile: a thread that waits for the lock holds the turnstile, and a returning thread must pass it first.
    """

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turnstile:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
