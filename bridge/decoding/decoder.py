"""Payloads of an engine's messages -> runs of events.

Shapes are detected, never configured: batches as maps or as arrays of at least two, events as arrays or maps, hashes
signed, unsigned or as bytes, tokens or pairs of tokens, missing and unknown fields.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from bridge.decoding.events import (
    AttentionSpec,
    ClearedRun,
    InvalidEvent,
    PageRun,
    Run,
    decode_mooncake_event,
    may_remove,
    tier_of,
)
from bridge.decoding.kernels import columns, scan
from kv_events.engine_wire import Payload
from kv_events.errors import KvsightError
from kv_events.hashing import U64Array
from kv_events.kernels.bundles import pin
from kv_events.limits import MAX_ENGINE_EVENTS, MAX_PAGES_PER_BATCH
from kv_events.schema import UNREADABLE
from publisher.kernels.events import PageEvents

MAX_PAYLOAD_BYTES = 16 * 2**20
"""Larger payloads are not decoded."""

_MAX_NAME_BYTES = 1024
_MAX_EXTRA_BYTES = 2**20
_ROWS = 4096
_KEPT_BYTES = 2**22
"""Buffers for larger payloads are only kept until the next one."""

_Row: TypeAlias = list[int]
I64Array: TypeAlias = npt.NDArray[np.int64]


class UndecodableError(KvsightError):
    """A payload is not a batch of events."""


class Messages:
    """n encoded batches in the order of their arrival, one after the other in one buffer."""

    __slots__ = ("borders", "data", "seqs")

    def __init__(self, seqs: U64Array, data: memoryview, borders: I64Array) -> None:
        """seqs: uint64[n], sequence numbers. borders: int64[n + 1], ascending positions of the payloads in `data`."""
        self.seqs = seqs
        self.data = data
        self.borders = borders

    @classmethod
    def of(cls, batches: Iterable[tuple[int, Payload]]) -> Messages:
        """Join batches that are given as (sequence number, payload). A single payload of bytes is not copied."""
        numbered = list(batches)
        data = b"".join(payload for _, payload in numbered)
        borders = np.array([0, *accumulate(len(payload) for _, payload in numbered)], np.int64)
        return cls(np.array([seq for seq, _ in numbered], np.uint64), memoryview(data), borders)

    def __len__(self) -> int:
        return len(self.seqs)

    def one(self, number: int) -> tuple[int, memoryview]:
        start, stop = self.borders[number : number + 2].tolist()
        return int(self.seqs[number]), self.data[start:stop]

    def part(self, start: int, stop: int) -> Messages:
        return Messages(self.seqs[start:stop], self.data, self.borders[start : stop + 1])

    @property
    def num_bytes(self) -> int:
        return int(self.borders[-1] - self.borders[0])


class Batch(NamedTuple):
    """The events of one message, or of several consecutive ones."""

    rank: int | None
    """DP rank that the batch itself names; None if it names none."""
    num_bad_ranks: int
    """Messages with an invalid rank, which is ignored."""
    runs: Iterator[tuple[Run, int]]
    """Runs, and how many events each stands for. Arrays are views of the decoder's buffers: consume the runs before the
    next batch."""
    is_complete: bool
    """False if more events of the last message follow in the next batch."""


class UnreadableBatch(NamedTuple):
    number: int
    """Position among the messages."""
    reason: str


class Decoder(threading.local):
    """Decodes into buffers that grow with the payloads.

    Each thread has its own; it decodes one batch at a time. An iterator may go on on another thread.
    """

    def __init__(self) -> None:
        self._make_room(0)

    def decode(self, payload: Payload) -> Batch:
        """Decode one payload. Raises UndecodableError."""
        parts = self.decode_all(Messages.of([(0, payload)]))
        first = next(parts)
        if isinstance(first, UnreadableBatch):
            raise UndecodableError(first.reason)
        more = (part.runs for part in parts if isinstance(part, Batch))
        return first._replace(runs=chain(first.runs, chain.from_iterable(more)), is_complete=True)

    def decode_all(self, messages: Messages) -> Iterator[Batch | UnreadableBatch]:
        """Decode consecutive payloads, with those of one rank in one batch."""
        readable = messages
        if np.diff(messages.borders).max(initial=0) > MAX_PAYLOAD_BYTES:
            every = map(messages.one, range(len(messages)))
            readable = Messages.of((seq, each if len(each) <= MAX_PAYLOAD_BYTES else b"") for seq, each in every)
        return self._batches(messages, readable)

    def _make_room(self, num_bytes: int) -> None:
        self._room = num_bytes
        self._events = columns.ScannedEvents(
            np.empty((_ROWS, columns.NUM_COLUMNS), np.int64),
            np.empty(_ROWS, np.int64),
            np.empty(_ROWS, np.uint64),
            np.empty(_ROWS, np.uint8),
            np.empty(_ROWS, np.uint8),
            np.empty(2 * num_bytes + 1, np.uint64),
            np.empty(2 * num_bytes + 1, np.uint32),
        )
        self._pinned = pin(self._events)

    def _batches(self, messages: Messages, readable: Messages) -> Iterator[Batch | UnreadableBatch]:
        """readable: the messages, empty where one is too large."""
        data, header = np.frombuffer(readable.data, np.uint8), np.zeros(scan.NUM_HEADER, np.int64)
        number = 0
        while number < len(messages):
            if not readable.num_bytes <= self._room <= max(readable.num_bytes, _KEPT_BYTES):
                self._make_room(readable.num_bytes)
            is_read = scan.scan_batches(data, readable.borders, header, self._pinned)
            number, *_, rank, num_bad_ranks, num_rows, _hashes, _tokens, _run = header.tolist()
            if is_read:
                runs, is_complete = self._runs(readable.data, num_rows), not header[scan.IS_OPEN]
                yield Batch(None if rank < 0 else rank, num_bad_ranks, runs, is_complete)
            else:
                yield UnreadableBatch(number - 1, _why_unreadable(len(messages.one(number - 1)[1]), header[scan.LEFT]))

    def _runs(self, data: memoryview, num_rows: int) -> Iterator[tuple[Run, int]]:
        begins = np.flatnonzero(self._events.rows[:num_rows, columns.CONTINUES] == 0).tolist()
        for start, stop in pairwise([*begins, num_rows]):
            try:
                run = self._run(data, self._events.rows[start].tolist(), start, stop)
            except UNREADABLE:
                yield from ((self._single(data, number), 1) for number in range(start, stop))
            else:
                yield run, stop - start

    def _run(self, data: memoryview, row: _Row, start: int, stop: int) -> Run:
        """The run of events start:stop. row: that of the first. Raises one of UNREADABLE."""
        match row[columns.KIND]:
            case columns.STORED | columns.REMOVED:
                return self._pages(data, row, start, stop)
            case columns.CLEARED:
                return ClearedRun(stop - start)
            case columns.MOONCAKE_EVENT:
                return decode_mooncake_event(data[row[columns.START] : row[columns.STOP]])
            case kind:
                return InvalidEvent(columns.REASONS[row[columns.REASON]], kind != columns.BAD_STORE, stop - start)

    def _single(self, data: memoryview, number: int) -> Run:
        row = self._events.rows[number].tolist()
        row[columns.STORE_ROW] = number if row[columns.KIND] == columns.STORED else -1
        try:
            return self._run(data, row, number, number + 1)
        except UNREADABLE:
            may_be_removal = row[columns.KIND] != columns.STORED
            if row[columns.KIND] == columns.MOONCAKE_EVENT:
                may_be_removal = may_remove(data[row[columns.START] : row[columns.STOP]])
            return InvalidEvent("field", may_be_removal)

    def _pages(self, data: memoryview, row: _Row, start: int, stop: int) -> PageRun:
        scanned, here = self._events, slice(start, stop)
        last = row if stop == start + 1 else scanned.rows[stop - 1].tolist()
        kinds, medium = scanned.kinds[here], ""
        first_store, group = row[columns.STORE_ROW], None if row[columns.GROUP] < 0 else row[columns.GROUP]
        store = scanned.rows[first_store].tolist() if first_store > start else row
        tier = store[columns.TIER]
        if tier == columns.UNKNOWN:
            medium = _text(data, row, columns.MEDIUM)
            tier = tier_of(medium, _text(data, row, columns.LOCALITY))
            kinds = (kinds & np.uint8(columns.REMOVAL)) + np.uint8(tier)
        hashes = scanned.hashes[row[columns.HASH_FROM] : last[columns.HASH_TO]]
        lengths, parents, has_parent = scanned.lengths[here], scanned.parents[here], scanned.has_parent[here]
        events = PageEvents(hashes, hashes, lengths, parents, has_parent, kinds)
        if first_store < 0:
            return PageRun(events, tier, group, medium, is_removal=True)
        tokens = scanned.tokens[row[columns.TOKEN_FROM] : last[columns.TOKEN_TO]]
        extra = data[store[columns.EXTRA] : store[columns.EXTRA] + store[columns.EXTRA_LENGTH]]
        if len(extra) > _MAX_EXTRA_BYTES or (extra and len(hashes) > MAX_PAGES_PER_BATCH):
            raise msgspec.ValidationError(f"extra keys of {len(extra)} bytes, for {len(hashes)} pages")
        return PageRun(
            events,
            tier,
            group,
            medium,
            is_mixed=bool(row[columns.IS_MIXED]) and stop > start + 1,
            tokens=tokens,
            num_positions=len(tokens) - store[columns.PAIRS],
            is_bigram=bool(store[columns.PAIRS]),
            block_size=store[columns.BLOCK_SIZE],
            spec=AttentionSpec(_text(data, store, columns.SPEC), store[columns.WINDOW]),
            lora_name=_text(data, store, columns.LORA) or str(store[columns.LORA_ID] or ""),
            cache_salt=_text(data, store, columns.SALT),
            extra_keys=msgspec.msgpack.decode(extra) if extra else (),
        )


def _why_unreadable(num_bytes: int, num_events: int) -> str:
    if num_bytes > MAX_PAYLOAD_BYTES:
        return f"{num_bytes} bytes, at most {MAX_PAYLOAD_BYTES}"
    if num_events > MAX_ENGINE_EVENTS:
        return f"{num_events} events, at most {MAX_ENGINE_EVENTS}"
    return f"{num_bytes} bytes that are not an event batch"


def _text(data: memoryview, row: _Row, column: int) -> str:
    length = row[column + 1]
    if not length:
        return ""
    if length > _MAX_NAME_BYTES:
        raise msgspec.ValidationError(f"a name of {length} bytes")
    return str(data[row[column] : row[column] + length], "utf-8")
