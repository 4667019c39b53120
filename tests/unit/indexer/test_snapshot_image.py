"""Snapshot images that no indexer wrote."""

from __future__ import annotations

import time
import zlib
from collections import deque

import msgspec
import numpy as np
import pytest

from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.snapshots.base import SnapshotDamagedError
from indexer.snapshots.image import SnapshotParts, take, unpack
from kv_events.codec import StoredPages
from kv_events.streams import StreamId

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
    copying, num_slices = take(namespaces, {0: 1}, 0.0), 0
    while True:
        try:
            next(copying)
            num_slices += 1
        except StopIteration as end:
            pieces = list(end.value.pack())
            break
    assert num_slices > 10
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
        b"\x94" + msgspec.msgpack.encode([1.5, {0: 7}, []])[1:] + b"\x91" * 100_000 + b"\xc0",  # nested
        b"\x93\xcb" + bytes(8) + b"\x81\x00\x05\x91\x91\xa2\xff\xfe",  # no UTF-8
    ],
)
def test_any_other_body_is_damage(body: bytes) -> None:
    with pytest.raises(SnapshotDamagedError):
        unpack(sealed(body), SETTINGS)
