"""The interface of snapshot stores."""

from collections.abc import Iterable
from typing import ClassVar, Protocol, TypeAlias

from kv_events.errors import KvsightError

Piece: TypeAlias = bytes | bytearray | memoryview
"""Consecutive bytes of an image. A memoryview has items of one byte."""


class SnapshotStoreError(KvsightError):
    """The store cannot be reached or written now. The next snapshot tries again."""

    retriable: ClassVar[bool] = True


class SnapshotDamagedError(KvsightError):
    """A snapshot cannot be read. The event log is replayed instead."""


class SnapshotStore(Protocol):
    """Stores the newest image of all views, or of the registered engines. Belongs to one event loop."""

    async def save(self, pieces: Iterable[Piece]) -> None:
        """Replace the snapshot. A reader sees either the old one or this one, complete. Raises SnapshotStoreError.

        pieces: the image. They are taken one by one, and none is kept after it is written.
        """

    async def load(self) -> bytes | None:
        """Return the newest snapshot, or None if there is none. Raises SnapshotStoreError."""

    async def close(self) -> None:
        """Close connections."""
