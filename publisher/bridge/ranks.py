"""What one publisher's batches become: the worker streams of the DP ranks that speak through it."""

from __future__ import annotations

import asyncio
import logging
import time

from kv_events.limits import MAX_DP_RANK
from kv_events.streams import StreamId
from publisher.bridge.counters import BridgeCounters
from publisher.bridge.decoding import Decoder, Unreadable
from publisher.bridge.envelopes import Envelope
from publisher.bridge.runs import BadEvent, Run
from publisher.bridge.streams import StreamRegistry, StreamStatus, WorkerStream
from publisher.bridge.translate import Unsaid

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0
_MOST_GUEST_RANKS = 128
_MOST_WAITING_BYTES = 2**18
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
        """registered: the stream of batches that name no rank. One that has an owner is shared with nobody; then
        nothing of it is published here.
        """
        self._registered = registered
        self._unsaid = unsaid
        self._registry = registry
        self._decoder = decoder
        self._counters = counters
        self._waiting: list[tuple[int, bytes]] = []  # in order
        self._waiting_bytes = 0
        self._logged_at = -_LOG_INTERVAL_S
        self._streams: dict[int, WorkerStream] = {}
        own = registry.open(registered, unsaid, counters, is_registered=True)
        if own is not None:
            self._streams[registered.dp_rank] = own

    def take(self, seq: int, payload: bytes) -> None:
        """The next batch."""
        self._waiting.append((seq, payload))
        self._waiting_bytes += len(payload)
        if self._waiting_bytes > _MOST_WAITING_BYTES:
            self.apply_waiting()

    def apply_waiting(self) -> None:
        """Decode and apply what was taken."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        self._counters.batches += len(waiting)
        for batch in self._decoder.decode_all([payload for _, payload in waiting]):
            if isinstance(batch, Unreadable):
                seq, payload = waiting[batch.number]
                self._counters.undecodable += 1
                self.complain("batch %d: %s", seq, batch.reason)
                if payload:
                    self.lose(1)  # there may have been removals in it
                continue
            self._counters.bad_ranks += batch.num_bad_ranks
            stream = self._stream(batch.rank)
            for run, num_events in batch.runs:
                self._counters.events += num_events
                if isinstance(run, BadEvent):
                    self.complain("event of batches %d to %d left out: %s", waiting[0][0], waiting[-1][0], run.reason)
                self._apply(run, stream)

    def lose(self, num_batches: int) -> None:
        """Batches are not to be had any more. Pages may have gone with them, so none is trusted any more."""
        self.apply_waiting()
        self._counters.lost_batches += num_batches
        self._counters.losses += 1
        self.complain("%d batches are lost, all its pages are given up", num_batches)
        for stream in self._streams.values():
            stream.clear()

    def restart(self) -> None:
        """What comes next is of another incarnation."""
        self.apply_waiting()
        for stream in self._streams.values():
            stream.restart()

    async def settle(self) -> None:
        """Start and close what that takes."""
        self.apply_waiting()
        for rank, stream in list(self._streams.items()):
            if stream.is_replaced:
                del self._streams[rank]
                await stream.close(_REPLACED_DEADLINE_S, clear=False)
            else:
                await stream.settle()

    async def close(self, deadline_s: float, *, clear: bool) -> None:
        """Close all streams."""
        self.apply_waiting()
        await asyncio.gather(*(stream.close(deadline_s, clear=clear) for stream in self._streams.values()))
        self._streams.clear()

    def status(self) -> list[StreamStatus]:
        """Figures of all ranks."""
        return [stream.status() for stream in list(self._streams.values())]

    def complain(self, text: str, *facts: object) -> None:
        """Say now and then what is wrong; the counters have it all."""
        if time.monotonic() >= self._logged_at + _LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            log.warning("engine %s: " + text, self._registered.key, *facts)

    def _apply(self, run: Run, stream: WorkerStream | None) -> None:
        if isinstance(run, Envelope) and run.dp_rank is not None:
            stream = self._stream(run.dp_rank)
        if stream is not None:
            stream.apply(run)

    def _stream(self, rank: int | None) -> WorkerStream | None:
        """The stream of a rank that events name; that of the registered rank if they name none, or one not theirs."""
        own = self._registered.dp_rank
        rank = own if rank is None else rank
        stream = self._streams.get(rank)
        if stream is not None and not stream.is_replaced:
            return stream
        if rank != own:
            if stream is None and 0 <= rank <= MAX_DP_RANK and len(self._streams) <= _MOST_GUEST_RANKS:
                guest = self._registry.open(
                    self._registered._replace(dp_rank=rank), self._unsaid, self._counters, is_registered=False
                )
                if guest is not None:
                    self._streams[rank] = guest
                    return guest
            self._counters.bad_ranks += 1
        return self._streams.get(own)
