"""Images of views, and the contract of the stores that keep them."""

import os
import time
import uuid
import zlib
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings, RedisSettings
from indexer.slices import run_at_once
from indexer.snapshots.base import FolderStore, SnapshotDamagedError, SnapshotStore, SnapshotStoreError
from indexer.snapshots.image import SnapshotParts, take, unpack
from indexer.snapshots.redis import RedisStore
from indexer.views import ViewState
from kv_events.codec import StoredPages
from kv_events.schema import BATCHES_LOST, SnapshotBegin
from kv_events.streams import StreamId
from tests.rigs.views import Views
from tests.support.log.records import Stream, stored

SETTINGS = IndexerSettings.ignoring_environment()
MAGIC = bytes(next(SnapshotParts(deque()).pack()))[:8]


def sealed(body: bytes) -> bytes:
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def test_a_documented_body_is_read() -> None:
    assert unpack(sealed(msgspec.msgpack.encode([1.5, {0: 7}, []])), SETTINGS).positions == {0: 7}


def test_a_copy_of_many_namespaces_does_not_delay_records() -> None:
    namespaces = Namespaces(SETTINGS)
    for number in range(SETTINGS.max_namespaces):
        namespaces.add_view(StreamId(f"m{number}", "default", "w", 0), 16)
    began = time.thread_time()
    for _ in take(namespaces, {}, 0.0):
        pass
    assert time.thread_time() - began < 0.2


def test_a_snapshot_is_copied_and_written_in_small_pieces() -> None:
    """A large piece would hold the interpreter while it is copied or freed, and with it all queries."""
    namespaces = Namespaces(SETTINGS)
    views = [namespaces.add_view(StreamId("m", "default", f"w{number}", 0), 16) for number in range(70)]
    for number in range(100):
        hashes = np.arange(1000 * number + 1, 1000 * number + 1001, dtype=np.uint64)
        pages = StoredPages(0, hashes, hashes, np.ones(125, np.uint8), np.zeros(125 * 8, np.uint64))
        for view in views[: number % 70 + 1]:
            view.index.store(view.number, pages, 0, 1000)
    assert sum(1 for _ in take(namespaces, {0: 1}, 0.0)) > 10
    pieces = list(run_at_once(take(namespaces, {0: 1}, 0.0)).pack())
    assert max(map(len, pieces)) <= 2**18
    (namespace,) = unpack(b"".join(pieces), SETTINGS).namespaces
    assert namespace.index.num_pages == 100_000
    namespace.index.check()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93",
        msgspec.msgpack.encode([1.5, {"0": 7}, []]),
        msgspec.msgpack.encode([1.5, {0: 7}, [["m", "t", 16, [], b"\1", b"", b"", b"", 1]]]),
        msgspec.msgpack.encode(
            [
                1.5,
                {},
                [["m", "t", 16, [["w", 0, 0, 0, 0, 0.0, "live", "", {"batches": 2**63}, bytes(64)]], *[b""] * 4, 4]],
            ]
        ),  # a count that no column can hold
        b"\x94" + msgspec.msgpack.encode([1.5, {0: 7}, []])[1:] + b"\x91" * 100_000 + b"\xc0",  # nested
        b"\x93\xcb" + bytes(8) + b"\x81\x00\x05\x91\x91\xa2\xff\xfe",  # no UTF-8
    ],
)
def test_any_other_body_is_damage(body: bytes) -> None:
    with pytest.raises(SnapshotDamagedError):
        unpack(sealed(body), SETTINGS)


def test_a_snapshot_keeps_every_view_and_its_scores() -> None:
    views = Views()
    streams = [Stream(f"w{i}", dp_rank=i % 2, block_size=4 + 4 * (i % 2)) for i in range(70)]
    for i, stream in enumerate(streams):
        for record in (stream.batch(stored((0, list(range(1, i + 2))), tier=i % 4)), stream.batch()):
            views.read(record, at=5.0)
    views.read(streams[0].batch(SnapshotBegin()), streams[1].batch(degraded_reason=BATCHES_LOST), at=5.0)
    parts = run_at_once(take(views.applier.namespaces, {0: 7, 3: 9}, 6.0))
    snapshot = unpack(b"".join(parts.pack()), SETTINGS)
    assert (snapshot.positions, snapshot.taken_at) == ({0: 7, 3: 9}, 6.0)
    prompt = np.arange(1, 80, dtype=np.uint64)
    for old in views.applier.namespaces:
        (new,) = [n for n in snapshot.namespaces if n.key == old.key]
        new.index.check()
        before, after = old.index.find(prompt), new.index.find(prompt)
        assert before.streams.tolist() == after.streams.tolist()
        assert before.pages[before.streams].tolist() == after.pages[after.streams].tolist()
    cut_off, degraded = (snapshot.namespaces.view(stream.id) for stream in streams[:2])
    assert cut_off is not None
    assert degraded is not None
    assert (cut_off.state, cut_off.stale_reason) == (ViewState.STALE, "resync cut off")
    assert (degraded.state, degraded.reason) == (ViewState.LIVE, BATCHES_LOST)


# --- stores -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("value", ["garbage", "name -1", b"\xff 1 2"])
async def test_a_key_that_names_no_snapshot_is_shown_and_replaced(redis_url: str, value: str | bytes) -> None:
    prefix = f"test:{uuid.uuid4().hex}"
    store = RedisStore(RedisSettings(redis=redis_url), prefix=prefix)
    await store._redis.set(f"{prefix}:current", value)
    for look in (store.load, store.has_snapshot):
        with pytest.raises(SnapshotStoreError, match=f"{prefix}:current has b'.*', which names no snapshot"):
            await look()
    await store.save([b"image"])
    assert await store.load() == b"image"
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
