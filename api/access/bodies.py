"""A bound on the bodies that a server holds, over all connections."""

from __future__ import annotations

from collections.abc import Callable

from api.problems import ProblemError, ProblemKind

SMALL_BYTES = 2**16
"""Smaller bodies are not counted: usual requests have room at any time."""
BODIES = 8
"""Bodies of the largest size that have room at once."""


class BodyLimit:
    """Counts the bytes of large bodies, from their arrival until the requests are answered.

    If there are too many, those that have been arriving for the longest time are refused.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._most = BODIES * max_body_bytes
        self._held = 0
        self._bytes: dict[object, int] = {}  # by request
        self._arriving: dict[object, Callable[[ProblemError], None]] = {}  # the oldest first

    def note(self, request: object, num_bytes: int, refuse: Callable[[ProblemError], None]) -> None:
        """Note how much of a body has arrived. refuse: refuses this request."""
        if num_bytes <= SMALL_BYTES:
            return
        self._arriving.setdefault(request, refuse)
        self._held += num_bytes - self._bytes.get(request, 0)
        self._bytes[request] = num_bytes
        while self._held > self._most and self._arriving:
            oldest, refuse_oldest = next(iter(self._arriving.items()))
            self.release(oldest)
            detail = f"body: large bodies that arrive or wait for an answer have more than {self._most} bytes together"
            refuse_oldest(ProblemError(503, ProblemKind.OVERLOADED, detail, "body", retry_after_s=1))

    def complete(self, request: object) -> None:
        """Note that a body has arrived completely."""
        self._arriving.pop(request, None)

    def release(self, request: object) -> None:
        """Note that a request is answered, or gone."""
        self._arriving.pop(request, None)
        self._held -= self._bytes.pop(request, 0)
