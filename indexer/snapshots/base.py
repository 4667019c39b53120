"""The interface of snapshot stores, and the store with one file, which is replaced by renaming."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

from kv_events.errors import KvsightError
from kv_events.log.format import replace_file

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


SNAPSHOT_NAME = "views.kvsnap"
_LEFT_S = 300.0


class FolderStore:
    """See `SnapshotStore`. The bytes are on disk before the name changes."""

    def __init__(self, folder: Path, name: str = SNAPSHOT_NAME) -> None:
        self._folder = folder
        self._name = name

    async def save(self, pieces: Iterable[Piece]) -> None:
        try:
            await asyncio.to_thread(self._write, pieces)
        except OSError as error:
            raise SnapshotStoreError(f"snapshot folder {self._folder}: {error}") from error

    async def load(self) -> bytes | None:
        try:
            return await asyncio.to_thread((self._folder / self._name).read_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotStoreError(f"snapshot folder {self._folder}: {error}") from error

    async def close(self) -> None:
        """Nothing is open between two calls."""

    def _write(self, pieces: Iterable[Piece]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        replace_file(self._folder / self._name, pieces, sync=True)

    def _remove_leftovers(self) -> None:
        """Remove what processes have left that were killed while they wrote."""
        for path in self._folder.glob(f"{self._name}.*"):
            if path.suffix[1:].isdecimal() and time.time() - path.stat().st_mtime > _LEFT_S:
                path.unlink(missing_ok=True)
