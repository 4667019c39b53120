"""Registrations that survive a restart: JSON in a snapshot store, loaded entry by entry."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable

import msgspec

from bridge import EngineSettings
from indexer.snapshots.base import SnapshotStore, SnapshotStoreError

logger = logging.getLogger(__name__)

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class OtherWriterError(SnapshotStoreError):
    """Another process has saved its own registrations since this one read them."""

    def __init__(self) -> None:
        super().__init__(
            "another service saves its registrations in the same place: each needs a folder (--snapshot-dir) or "
            "a Redis database (KVSIGHT_REDIS, redis://HOST:PORT/DB) of its own"
        )


class _SavedList(msgspec.Struct):
    engines: list[msgspec.Raw]
    writer: str = ""
    """Process that saved the list. "" if there is none, or if it cannot be decoded."""


class SavedRegistrations:
    """The saved list. Belongs to one event loop."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._own_name = uuid.uuid4().hex
        self._writer_before = ""  # the process whose list this one took over

    async def load(self) -> list[EngineSettings]:
        """Return the saved registrations. Raises SnapshotStoreError."""
        saved = _decoded(await self._store.load())
        self._writer_before = saved.writer
        return _readable(saved.engines)

    async def save(self, engines: Iterable[EngineSettings]) -> None:
        """Replace the list. Raises SnapshotStoreError; if it is OtherWriterError, nothing was overwritten."""
        writer = _decoded(await self._store.load()).writer
        if writer not in ("", self._own_name, self._writer_before):
            raise OtherWriterError
        await self._store.save([msgspec.json.encode({"engines": list(engines), "writer": self._own_name})])

    async def close(self) -> None:
        """Close connections."""
        await self._store.close()


def _decoded(data: bytes | None) -> _SavedList:
    try:
        return msgspec.json.decode(data, type=_SavedList) if data else _SavedList([])
    except _UNREADABLE as error:
        logger.warning("the saved registrations cannot be decoded: %s", error)
        return _SavedList([])


def _readable(entries: Iterable[msgspec.Raw]) -> list[EngineSettings]:
    engines = []
    for entry in entries:
        try:
            engines.append(msgspec.json.decode(entry, type=EngineSettings))
        except _UNREADABLE as error:
            logger.warning("a saved registration cannot be decoded: %s", error)
    return engines
