"""Lists that are saved where snapshots are, so that a restarted service knows them: registrations, records of workers."""

import logging
import uuid
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from indexer.snapshots.base import SnapshotStore, SnapshotStoreError

logger = logging.getLogger(__name__)

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_T = TypeVar("_T")


class OtherWriterError(SnapshotStoreError):
    """Another process has saved its own list since this one read it."""

    def __init__(self) -> None:
        super().__init__(
            "another service saves its registrations in the same place: each needs a folder (--snapshot-dir) or "
            "a Redis database (KVSIGHT_REDIS, redis://HOST:PORT/DB) of its own"
        )


class _Image(msgspec.Struct):
    engines: list[msgspec.Raw]
    writer: str = ""
    """Process that saved the list. "" if there is none, or if it cannot be decoded."""


class SavedList(Generic[_T]):
    """One saved list of structs. Belongs to one event loop."""

    def __init__(self, store: SnapshotStore, kind: type[_T]) -> None:
        """kind: the struct of its entries."""
        self._store = store
        self._kind = kind
        self._own_name = uuid.uuid4().hex
        self._writer_before = ""  # the process whose list this one took over

    async def load(self) -> list[_T]:
        """Return the saved entries. Raises SnapshotStoreError."""
        saved = _decoded(await self._store.load())
        self._writer_before = saved.writer
        return self._readable(saved.engines)

    async def save(self, entries: Iterable[_T]) -> None:
        """Replace the list. Raises SnapshotStoreError; if it is OtherWriterError, nothing was overwritten."""
        writer = _decoded(await self._store.load()).writer
        if writer not in ("", self._own_name, self._writer_before):
            raise OtherWriterError
        await self._store.save([msgspec.json.encode({"engines": list(entries), "writer": self._own_name})])

    async def close(self) -> None:
        """Close connections."""
        await self._store.close()

    def _readable(self, entries: Iterable[msgspec.Raw]) -> list[_T]:
        found = []
        for entry in entries:
            try:
                found.append(msgspec.json.decode(entry, type=self._kind))
            except _UNREADABLE as error:
                logger.warning("a saved registration cannot be decoded: %s", error)
        return found


def _decoded(data: bytes | None) -> _Image:
    try:
        return msgspec.json.decode(data, type=_Image) if data else _Image([])
    except _UNREADABLE as error:
        logger.warning("the saved registrations cannot be decoded: %s", error)
        return _Image([])
