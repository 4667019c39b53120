"""Batches of one engine stream -> the worker streams of the DP ranks that they name."""

import asyncio
import logging
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

from bridge.context import BridgeCounters
from bridge.decoding.decoder import Messages, UnreadableBatch
from bridge.decoding.events import InvalidEvent, MooncakeEvent, Run
from bridge.registry import StreamRegistry
from bridge.republisher import Republisher
from bridge.settings import EngineDefaults
from bridge.worker_stream import EngineState, StreamStatus, WorkerStream
from kv_events.engine_wire import Payload
from kv_events.limits import MAX_DP_RANK
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.runtime.words import count
from kv_events.streams import StreamId

logger = logging.getLogger(__name__)

_MAX_EXTRA_RANKS = 128
_REPLACED_DEADLINE_S = 0.2


class Missed(NamedTuple):
    """Batches that cannot be recovered, since the pages of the engine were last known completely."""

    first: int
    last: int
    num_batches: int
    since: float
    """Seconds since 1970."""

    def __str__(self) -> str:
        if self.num_batches == 1:
            return f"missed batch {self.first}"
        is_range = self.num_batches == self.last - self.first + 1
        return f"missed {'' if is_range else f'{self.num_batches} '}batches {self.first} to {self.last}"


class RankStreams:
    """Decodes batches together, because that costs less, and applies them in order.

    Batches wait until `apply_waiting`. None may wait when `drop_all_pages` and `restart` are called. Only one task at
    a time may call it, except for `status`.
    """

    def __init__(
        self,
        registered: StreamId,
        defaults: EngineDefaults,
        registry: StreamRegistry,
        counters: BridgeCounters,
        republisher: Republisher | None = None,
    ) -> None:
        """registered: the stream of batches that name no rank. Nothing is published while it has another owner.
        republisher: also gets the batches that are applied.
        """
        self._registered, self.worker, self.key = registered, registered.worker, registered.key
        self._registry = registry
        self._decoder = registry.decoder
        self._counters = counters
        self._republisher = republisher
        self.limited_logger = RateLimitedLogger(logger, f"engine {registered.key}")
        self._context = registry.context(defaults, counters, self.limited_logger)
        self._waiting: list[tuple[int, Payload]] = []  # in order
        self.waiting_bytes = 0
        """Total size of the batches that wait."""
        self._state = EngineState()
        self._is_incomplete = False  # batches of this incarnation are missing
        self.missed: Missed | None = None
        """None: nothing was missed since the last restart."""
        self._streams: dict[int, WorkerStream] = {}
        self._open(registered.dp_rank)

    @property
    def failure(self) -> str | None:
        """Why the registered rank is not published; None if it is."""
        is_ours = self._registered.dp_rank in self._streams
        return None if is_ours else f"{self._registered.key} has another owner"

    def take(self, seq: int, payload: Payload) -> None:
        self._waiting.append((seq, payload))
        self.waiting_bytes += len(payload)

    def apply_waiting(self) -> Generator[None, None, None]:
        """Decode and apply the batches that wait. Yields after each step."""
        if self._waiting:
            waiting, self._waiting, self.waiting_bytes = self._waiting, [], 0
            yield from self.apply(Messages.of(waiting))

    def apply(self, messages: Messages) -> Iterator[None]:
        """Decode and apply the next batches. Yields after each step."""
        yield from self.apply_waiting()
        if self._republisher is not None:
            self._republisher.take(messages)
        if self.failure is not None:
            self._is_incomplete = True
        try:
            yield from self._apply_all(messages)
        except Exception as error:  # noqa: BLE001  (logged; other engines of the address go on)
            between = int(messages.seqs[0]), int(messages.seqs[-1])
            self.limited_logger.warning("batches %d to %d cannot be applied", *between, error=error)
            self._drop_all_pages(len(messages), *between)
        self._counters.batches += len(messages)  # those that are applied: a step may be followed by anything

    def set_state(self, **changes: bool) -> None:
        """Note changes of the engine's state. See `EngineState` for their names."""
        state = self._state._replace(**changes)
        if state != self._state:
            self._state = state
            for stream in self._streams.values():
                stream.set_state(state)

    def mark_incomplete(self, first: int, last: int) -> None:
        """Note that the first batches of this incarnation are missing."""
        self._note_missed(last - first + 1, first, last)
        self._is_incomplete = True
        for stream in self._streams.values():
            stream.mark_incomplete()

    def drop_all_pages(self, num_batches: int, first: int, last: int) -> None:
        """Note batches that are permanently lost. They may have removed pages, so all pages are dropped."""
        self._clear_republished()
        self._drop_all_pages(num_batches, first, last)

    def _drop_all_pages(self, num_batches: int, first: int, last: int) -> None:
        """Do so for batches that arrived but cannot be read. The republisher has taken account of them."""
        self._note_missed(num_batches, first, last)
        self._counters.lost_batches += num_batches
        self._counters.losses += 1
        self.limited_logger.warning("%s lost, all its pages are dropped", count(num_batches, "batch", "batches"))
        self._is_incomplete = True
        for stream in self._streams.values():
            stream.drop_all_pages(num_batches)

    def restart(self, *, is_certain: bool) -> None:
        """Begin another incarnation. is_certain: False if it may be the same one."""
        self._is_incomplete, self.missed = False, None
        self._clear_republished()
        for stream in self._streams.values():
            stream.restart(is_certain=is_certain)

    async def start_and_close_publishers(self) -> None:
        if self._republisher is not None:
            self._republisher.flush()
        for rank, stream in list(self._streams.items()):
            if stream.is_replaced:
                del self._streams[rank]
                await self._close(stream, _REPLACED_DEADLINE_S, clear=False)
            else:
                await stream.start_and_close_publishers()
        if self.failure is not None:  # the other owner may have left
            self._open(self._registered.dp_rank)

    async def close(self, deadline_s: float, *, clear: bool) -> None:
        """Close all streams. What waits is left out."""
        await asyncio.gather(*(self._close(stream, deadline_s, clear=clear) for stream in self._streams.values()))
        self._streams.clear()

    def _clear_republished(self) -> None:
        if self._republisher is not None:
            self._republisher.clear()

    def status(self) -> list[StreamStatus]:
        return [status for stream in list(self._streams.values()) for status in stream.status()]

    def _note_missed(self, num_batches: int, first: int, last: int) -> None:
        if self.missed is None or not any(stream.is_incomplete for stream in self._streams.values()):
            self.missed = Missed(first, last, num_batches, time.time())
        else:
            held = self.missed
            ends = min(held.first, first), max(held.last, last)
            self.missed = Missed(*ends, held.num_batches + num_batches, held.since)

    async def _close(self, stream: WorkerStream, deadline_s: float, *, clear: bool) -> None:
        try:
            await stream.close(deadline_s, clear=clear)
        finally:
            self._registry.release(stream)

    def _apply_all(self, messages: Messages) -> Iterator[None]:
        for batch in self._decoder.decode_all(messages):
            if isinstance(batch, UnreadableBatch):
                seq, payload = messages.one(batch.number)
                self._counters.undecodable += 1
                self.limited_logger.warning("batch %d: %s", seq, batch.reason)
                if payload:
                    self._drop_all_pages(1, seq, seq)  # it may have removed pages
                continue
            self._counters.bad_ranks += batch.num_bad_ranks
            stream = self._stream(batch.rank)
            touched = {stream}
            for run, num_events in batch.runs:
                self._counters.events += num_events
                touched.add(self._apply_run(run, stream))
                if isinstance(run, InvalidEvent):
                    between = int(messages.seqs[0]), int(messages.seqs[-1])
                    self.limited_logger.warning("an event of batches %d to %d is left out: %s", *between, run.reason)
                    if run.may_remove:
                        self._drop_all_pages(1, *between)
            for each in touched:
                if each is None or not (batch.is_complete or each.translator.must_end_batch):
                    continue
                yield from each.end_batch()
                if problem := each.translator.problem:
                    self.limited_logger.warning("the view of rank %d is degraded: %s", each.stream.dp_rank, problem)
            yield

    def _apply_run(self, run: Run, stream: WorkerStream | None) -> WorkerStream | None:
        """Returns the stream of the rank that the run concerns."""
        if isinstance(run, MooncakeEvent) and run.dp_rank is not None:
            stream = self._stream(run.dp_rank)
        if stream is not None:
            stream.apply(run)
        return stream

    def _stream(self, rank: int | None) -> WorkerStream | None:
        """The stream of the rank that events name, or of the registered rank if they name none.

        None if the rank has another owner or is one too many. Its events are then dropped.
        """
        rank = self._registered.dp_rank if rank is None else rank
        stream = self._streams.get(rank)
        if stream is None and 0 <= rank <= MAX_DP_RANK and len(self._streams) <= _MAX_EXTRA_RANKS:
            stream = self._open(rank)
        if stream is not None and not stream.is_replaced:
            return stream
        self._counters.foreign_ranks += 1
        self.limited_logger.warning("events of rank %d are left out: it has another owner, or is one too many", rank)
        return None

    def _open(self, rank: int) -> WorkerStream | None:
        own = self._registered
        stream = self._registry.open(
            own._replace(dp_rank=rank), self._context, self._state, is_registered=rank == own.dp_rank
        )
        if stream is not None:
            self._streams[rank] = stream
            if self._is_incomplete:
                stream.mark_incomplete()
        return stream
