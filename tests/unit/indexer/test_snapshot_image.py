"""Snapshot images that no indexer wrote."""

from __future__ import annotations

import time
import zlib

import msgspec
import pytest

from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.snapshots.base import SnapshotDamagedError
from indexer.snapshots.image import SnapshotParts, take, unpack
from kv_events.streams import StreamId

SETTINGS = IndexerSettings.ignoring_environment()
MAGIC = SnapshotParts(0.0, {}, []).pack()[:8]


def sealed(body: bytes) -> bytes:
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def test_a_documented_body_is_read() -> None:
    assert unpack(sealed(msgspec.msgpack.encode([1.5, {0: 7}, []])), SETTINGS).positions == {0: 7}


def test_a_copy_of_many_namespaces_does_not_delay_records() -> None:
    namespaces = Namespaces(SETTINGS)
    for number in range(SETTINGS.max_namespaces):
        namespaces.add_view(StreamId(f"m{number}", "default", "w", 0), 16)
    began = time.thread_time()
    assert sum(1 for _ in take(namespaces, {}, 0.0)) == SETTINGS.max_namespaces
    assert time.thread_time() - began < 0.2


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
