"""The kernel that finds and checks the records of an event-log segment; `docs/event_log.md` documents the bytes."""

import numpy as np

from kv_events.kernels.bundles import I64Matrix, U8Input, U32Matrix
from kv_events.kernels.declare import helper, kernel
from kv_events.kernels.numbers import U64, int64, uint32, uint64

NUM_FIELDS = 8
BEGIN, END, PARTITION, OFFSET, TIMESTAMP_MS, KEY_BYTES, CHANNEL, PAYLOAD = range(NUM_FIELDS)
"""Columns of `find_records`. BEGIN, END and PAYLOAD are positions in the data."""

_FRAME_BYTES, _BODY_BYTES = 12, 24
_TABLES = 16


def checksum_tables() -> np.ndarray:
    """Return the tables of CRC-32 (polynomial 0xEDB88320), uint32[16, 256]: sixteen bytes are looked up at once."""
    tables = np.zeros((_TABLES, 256), np.uint32)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = np.where(tables[0] & 1, tables[0] >> 1 ^ uint32(0xEDB88320), tables[0] >> 1)
    for number in range(1, _TABLES):
        before = tables[number - 1]
        tables[number] = before >> 8 ^ tables[0][before & 255]
    return tables


@helper
def _u32(data: U8Input, at: int) -> U64:
    value = uint32(0)
    for i in range(4):
        value |= uint32(data[at + i]) << uint32(8 * i)
    return value


@helper
def _i64(data: U8Input, at: int) -> int:
    value = uint64(0)
    for i in range(8):
        value |= uint64(data[at + i]) << uint64(8 * i)
    return int64(value)


@helper
def _checksum(data: U8Input, start: int, stop: int, tables: U32Matrix) -> U64:
    low = uint32(255)
    crc = uint32(0xFFFFFFFF)
    at = start
    while at + 16 <= stop:
        mixed = crc ^ _u32(data, at)
        crc = (
            tables[15, mixed & low]
            ^ tables[14, mixed >> uint32(8) & low]
            ^ tables[13, mixed >> uint32(16) & low]
            ^ tables[12, mixed >> uint32(24)]
        )
        for i in range(4, 16):
            crc ^= tables[15 - i, data[at + i]]
        at += 16
    while at < stop:
        crc = tables[0, (crc ^ uint32(data[at])) & low] ^ crc >> uint32(8)
        at += 1
    return crc ^ uint32(0xFFFFFFFF)


@kernel
def find_records(data: U8Input, most_body_bytes: int, tables: U32Matrix, rows: I64Matrix) -> int:
    """Find the whole, sound records at the beginning of some data. Returns their number, at most len(rows).

    data: uint8[n]. tables: from `checksum_tables`. rows: int64[k, NUM_FIELDS], written, see `BEGIN`.
    """
    found = begin = 0
    while found < rows.shape[0] and begin + _FRAME_BYTES <= data.shape[0]:
        length = int64(_u32(data, begin))
        body = begin + _FRAME_BYTES
        if _u32(data, begin + 8) != _checksum(data, begin, begin + 8, tables):
            break
        if not _BODY_BYTES <= length <= most_body_bytes or body + length > data.shape[0]:
            break
        if _u32(data, begin + 4) != _checksum(data, body, body + length, tables):
            break
        key_bytes = int64(data[body + 20]) | int64(data[body + 21]) << 8
        if _BODY_BYTES + key_bytes > length:
            break
        rows[found, BEGIN] = begin
        rows[found, END] = body + length
        rows[found, PARTITION] = _u32(data, body)
        rows[found, OFFSET] = _i64(data, body + 4)
        rows[found, TIMESTAMP_MS] = _i64(data, body + 12)
        rows[found, KEY_BYTES] = key_bytes
        rows[found, CHANNEL] = data[body + 22]
        rows[found, PAYLOAD] = body + _BODY_BYTES + key_bytes
        begin = body + length
        found += 1
    return found
