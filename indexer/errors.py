"""Errors of the router side."""

from __future__ import annotations

from kv_events.errors import KvsightError


class IndexFullError(KvsightError):
    """A limit of the index is reached. Raise the setting, or let workers expire."""

    def __init__(self, what: str, bound: int) -> None:
        super().__init__(f"index full: at most {bound} {what}")
        self.what = what
        self.bound = bound
