"""The interface of snapshot stores."""

from __future__ import annotations

from typing import ClassVar, Protocol

from kv_events.errors import KvsightError


class SnapshotStoreError(KvsightError):
    """The store cannot be reached or written now. The next snapshot tries again."""

    retriable: ClassVar[bool] = True


class SnapshotDamagedError(KvsightError):
    """A snapshot cannot be read. The event log is replayed instead."""


class SnapshotStore(Protocol):
    """Stores the newest image of all views, or of the registered engines. Belongs to one event loop."""

    async def save(self, image: bytes) -> None:
        """Replace the snapshot. A reader sees either the old one or this one, complete. Raises SnapshotStoreError."""

    async def load(self) -> bytes | None:
        """Return the newest snapshot, or None if there is none. Raises SnapshotStoreError."""

    async def close(self) -> None:
        """Close connections."""
