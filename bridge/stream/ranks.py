"""What one publisher's batches become: the worker streams of the DP ranks that speak through it."""

from __future__ import annotations

import asyncio
import logging

from bridge.counters import BridgeCounters
from bridge.decoding.decoder import Decoder, Unreadable
from bridge.decoding.envelopes import Envelope
from bridge.decoding.runs import BadEvent, Run
from bridge.naming.identity import Unsaid
from bridge.registry import StreamRegistry, StreamStatus, WorkerStream
from kv_events.engine_wire import Payload
from kv_events.limits import MAX_DP_RANK
from kv_events.rate_limited_log import RateLimitedLog
from kv_events.streams import StreamId

log = logging.getLogger(__name__)

_MOST_GUEST_RANKS = 128
_REPLACED_DEADLINE_S = 0.2


class Ranks:
    """Takes batches in their order. They wait for one another, because together they cost less to decode, but for no
    step of another kind: `lose`, `restart`, `settle` and `close` apply them first. One task at a time may call it;
    `status` any.
    """

    def __init__(
        self,
        registered: StreamId,
        unsaid: Unsaid,
        registry: StreamRegistry,
        decoder: Decoder,
        counters: BridgeCounters,
    ) -> None:
        """registered: the stream of batches that name no rank. One that has an owner is shared with nobody; as long as
        it has, nothing of it is published here.
        """
        self._registered = registered
        self._unsaid = unsaid
        self._registry = registry
        self._decoder = decoder
        self._counters = counters
        self._limited_log = RateLimitedLog(log, f"engine {registered.key}")
        self._waiting: list[tuple[int, Payload]] = []  # in order
        self.waiting_bytes = 0
        """Of the batches that were taken and not applied."""
        self._is_engine_heard = False
        self._is_incomplete = False  # batches of this incarnation are missing
        self._streams: dict[int, WorkerStream] = {}
        self._open(registered.dp_rank)

    @property
    def failure(self) -> str | None:
        """Why nothing is published of the registered rank; None: it is."""
        is_ours = self._registered.dp_rank in self._streams
        return None if is_ours else f"{self._registered.key} has another owner"

    def take(self, seq: int, payload: Payload) -> None:
        """The next batch."""
        self._waiting.append((seq, payload))
        self.waiting_bytes += len(payload)

    def apply_waiting(self) -> None:
        """Decode and apply what was taken."""
        waiting, self._waiting, self.waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        self._counters.batches += len(waiting)
        if self.failure is not None:
            self._is_incomplete = True
        try:
            self._apply_all(waiting)
        except Exception as error:  # noqa: BLE001  (said, and others that speak on the address are read on)
            self._limited_log.warning("batches %d to %d are not taken", waiting[0][0], waiting[-1][0], error=error)
            self.lose(len(waiting))

    def hear(self, is_engine_heard: bool) -> None:
        """Whether the engine is heard at present; at first it is not."""
        if is_engine_heard != self._is_engine_heard:
            self._is_engine_heard = is_engine_heard
            for stream in self._streams.values():
                stream.hear(is_engine_heard)

    def begin_late(self) -> None:
        """The next batch is the first one of an incarnation that is to be had, and not the first one it sent."""
        self._is_incomplete = True
        for stream in self._streams.values():
            stream.begin_late()

    def lose(self, num_batches: int) -> None:
        """Batches are not to be had any more. Pages may have gone with them, so none is trusted any more."""
        self.apply_waiting()
        self._counters.lost_batches += num_batches
        self._counters.losses += 1
        self._limited_log.warning("%d batches are lost, all its pages are given up", num_batches)
        self._is_incomplete = True
        for stream in self._streams.values():
            stream.lose()

    def restart(self, *, is_certain: bool) -> None:
        """What comes next is of another incarnation, or may be."""
        self.apply_waiting()
        self._is_incomplete = False
        for stream in self._streams.values():
            stream.restart(is_certain=is_certain)

    async def settle(self) -> None:
        """Start and close what that takes."""
        self.apply_waiting()
        for rank, stream in list(self._streams.items()):
            if stream.is_replaced:
                del self._streams[rank]
                await stream.close(_REPLACED_DEADLINE_S, clear=False)
            else:
                await stream.settle()
        if self.failure is not None:  # until now
            self._open(self._registered.dp_rank)

    async def close(self, deadline_s: float, *, clear: bool) -> None:
        """Close all streams."""
        self.apply_waiting()
        await asyncio.gather(*(stream.close(deadline_s, clear=clear) for stream in self._streams.values()))
        self._streams.clear()

    def status(self) -> list[StreamStatus]:
        """Figures of all ranks."""
        return [stream.status() for stream in list(self._streams.values())]

    def complain(self, text: str, *facts: object) -> None:
        """See `RateLimitedLog.warning`."""
        self._limited_log.warning(text, *facts)

    def _apply_all(self, waiting: list[tuple[int, Payload]]) -> None:
        for batch in self._decoder.decode_all([payload for _, payload in waiting]):
            if isinstance(batch, Unreadable):
                seq, payload = waiting[batch.number]
                self._counters.undecodable += 1
                self._limited_log.warning("batch %d: %s", seq, batch.reason)
                if payload:
                    self.lose(1)  # there may have been removals in it
                continue
            self._counters.bad_ranks += batch.num_bad_ranks
            stream = self._stream(batch.rank)
            for run, num_events in batch.runs:
                self._counters.events += num_events
                self._apply(run, stream)
                if isinstance(run, BadEvent):
                    between = waiting[0][0], waiting[-1][0]
                    self._limited_log.warning("an event of batches %d to %d is left out: %s", *between, run.reason)
                    if run.may_remove:
                        self.lose(1)

    def _apply(self, run: Run, stream: WorkerStream | None) -> None:
        if isinstance(run, Envelope) and run.dp_rank is not None:
            stream = self._stream(run.dp_rank)
        if stream is not None:
            stream.apply(run)
            if stream.size_doubt:
                self.complain("none of its pages is taken: %s", stream.size_doubt)

    def _stream(self, rank: int | None) -> WorkerStream | None:
        """The stream of a rank that events name; that of the registered rank if they name none. None: it is not ours,
        and what they say is true of no other.
        """
        rank = self._registered.dp_rank if rank is None else rank
        stream = self._streams.get(rank)
        if stream is None and 0 <= rank <= MAX_DP_RANK and len(self._streams) <= _MOST_GUEST_RANKS:
            stream = self._open(rank)
        if stream is not None and not stream.is_replaced:
            return stream
        self._counters.foreign_ranks += 1
        self._limited_log.warning("what it says of rank %d is left out: the rank is another's, or one too many", rank)
        return None

    def _open(self, rank: int) -> WorkerStream | None:
        """Have a rank's stream, if nobody has it."""
        own = self._registered
        stream = self._registry.open(
            own._replace(dp_rank=rank),
            self._unsaid,
            self._counters,
            self._limited_log,
            is_registered=rank == own.dp_rank,
        )
        if stream is not None:
            self._streams[rank] = stream
            stream.hear(self._is_engine_heard)
            if self._is_incomplete:
                stream.begin_late()
        return stream
