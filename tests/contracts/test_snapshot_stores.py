"""The contract of snapshot stores, run on each of them."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from indexer.settings import RedisSettings
from indexer.snapshots.base import SnapshotStore, SnapshotStoreError
from indexer.snapshots.folder import FolderStore
from indexer.snapshots.redis import RedisStore


@pytest.fixture(params=["folder", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SnapshotStore]:
    made: SnapshotStore
    if request.param == "folder":
        made = FolderStore(tmp_path / "snapshots")
    else:
        made = RedisStore(RedisSettings(redis=request.getfixturevalue("redis_url")), prefix=f"test:{uuid.uuid4().hex}")
    yield made
    await made.close()


async def test_an_empty_store_has_no_snapshot(store: SnapshotStore) -> None:
    assert await store.load() is None


async def test_the_newest_snapshot_comes_back_whole(store: SnapshotStore) -> None:
    large = os.urandom(40 * 2**20)
    for image in (b"first", large, b""):
        await store.save([image])
        assert await store.load() == image


async def test_a_snapshot_in_pieces_comes_back_whole(store: SnapshotStore) -> None:
    large = os.urandom(5 * 2**20)
    pieces = (b"", large[:10], memoryview(large)[10:2_000_000], bytearray(large[2_000_000:]))
    await store.save(iter(pieces))
    assert await store.load() == large


async def test_a_folder_that_cannot_be_written_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SnapshotStoreError, match="file"):
        await FolderStore(tmp_path / "file").save([b"x"])


async def test_a_half_written_snapshot_is_never_loaded(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    await store.save([b"whole"])
    (tmp_path / "views.kvsnap.12345").write_bytes(b"half")
    assert await store.load() == b"whole"


async def test_a_redis_that_is_away_is_an_error_of_the_store() -> None:
    store = RedisStore(RedisSettings(redis="redis://127.0.0.1:1/0"))
    with pytest.raises(SnapshotStoreError, match="Redis"):
        await store.save([b"x"])
    with pytest.raises(SnapshotStoreError, match="Redis"):
        await store.load()
    await store.close()


async def test_redis_keeps_older_chunks_only_for_those_who_are_reading_them(redis_url: str) -> None:
    prefix = f"test:{uuid.uuid4().hex}"
    store = RedisStore(RedisSettings(redis=redis_url), prefix=prefix)
    for image in (b"one", b"two", b"three"):
        await store.save([image])
    keys = [key async for key in store._redis.scan_iter(f"{prefix}:*")]
    assert await store.load() == b"three"
    ttls = sorted([await store._redis.ttl(key) for key in keys])
    assert ttls[:2] == [-1, -1]  # the pointer and the newest chunk remain
    assert all(0 < ttl <= 60 for ttl in ttls[2:])
    await store.close()
