"""One engine's publisher: its batches in their order, none twice, none silently missing, into worker streams."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import aclosing

import zmq.asyncio

from bridge.counters import BridgeCounters
from bridge.decoding.decoder import Decoder
from bridge.naming.identity import Unsaid
from bridge.registry import StreamRegistry, StreamStatus
from bridge.stream.continuity import Continuity, RestartLimit, Verdict
from bridge.stream.ranks import Ranks
from bridge.stream.replay import ReplayClient, ReplayError, ReplayInterruptedError, ReplayUnreachableError
from bridge.worker_threads import Workers
from kv_events.engine_wire import LiveMessage, Payload
from kv_events.streams import StreamId

log = logging.getLogger(__name__)

_MOST_RESTARTS = 3
"""In one recovery; an engine that answers with other contents each time is given up until its next batch."""
_BATCHES_AT_A_TIME = 32
_BYTES_AT_A_TIME = 2**18
_REPLAY_PAUSE_S = 10.0
_SETTLED_S = 1.0
_MOST_CONTRADICTIONS = 5
_DISTRUST_S = 60.0
_HIGHEST_FIRST = 1
"""Engines count from 0, a Mooncake master from 1."""


class Source:
    """Everything that is known of one publisher. One task at a time may call it; `status` any."""

    def __init__(
        self,
        stream: StreamId,
        unsaid: Unsaid,
        registry: StreamRegistry,
        decoder: Decoder,
        counters: BridgeCounters,
        replay: ReplayClient | None,
        workers: Workers,
    ) -> None:
        """stream: as registered; batches may name other ranks. Raises nothing; a stream that has an owner is shared
        with nobody, and then this source publishes nothing.
        """
        self.heard_at = time.monotonic()
        """When its last batch came, or it was made."""
        self.connection: int | None = None
        """File descriptor of the connection that its last batch came over."""
        self.lost_at: float | None = None
        """When that connection was lost; None: it stands."""
        self._name = stream.key
        self._ranks = Ranks(stream, unsaid, registry, decoder, counters)
        self._counters = counters
        self._replay = replay
        self._workers = workers
        self._attempts = registry.settings.bridge_replay_attempts
        self._deadline_s = registry.settings.bridge_replay_deadline_s
        self._continuity = Continuity()
        self._no_replay_before = -math.inf  # a replay socket that failed is left alone for a while
        self._settled_until = -math.inf  # batches that do not fit are not worth a question before
        self._contradictions = 0  # live batches in a row that the engine's own replay does not know
        self._hole_at = -1  # number of a batch that an answer lacked
        self._restart_limit = RestartLimit()

    @property
    def failure(self) -> str | None:
        """Why nothing of it is published at present; None: it is."""
        if self._restart_limit.is_exceeded():
            return f"{self._name}: restarted so often that it is left out: are there several publishers on its address?"
        return self._ranks.failure

    async def open(self) -> None:
        """Begin to listen; if anew, take what the engine still keeps of the time that nobody was listening."""
        await self._ranks.settle()
        if not self._continuity.has_begun:
            return
        if await self._recover(is_doubtful=True, attempts=1):
            self.hear(True)
        else:
            self._restart("nobody listened for a while", is_certain=False)

    def hear(self, is_engine_heard: bool) -> None:
        """Whether the engine is heard at present. At first it is not, and after it was away not before it said
        something: until then nobody knows what happened meanwhile.
        """
        self._ranks.hear(is_engine_heard and not self._restart_limit.is_exceeded())

    async def take_live(self, messages: Sequence[LiveMessage]) -> None:
        """The next messages of the live stream, in order."""
        taken = 0
        self.heard_at = time.monotonic()
        while taken < len(messages) and not self._restart_limit.is_exceeded():
            taken += await self._workers.run(sum(len(m.payload) for m in messages), self._take_plain, messages, taken)
            if taken < len(messages):
                await self._take_doubtful(messages[taken])
                taken += 1
                await self._work_off()
                await asyncio.sleep(0)
        self._counters.stale_batches += len(messages) - taken
        await self._ranks.settle()

    def _take_plain(self, messages: Sequence[LiveMessage], start: int) -> int:
        """Take messages as long as they fit; how many. Any thread."""
        for number in range(start, len(messages)):
            _, seq, payload = messages[number]
            verdict = self._continuity.judge(seq, payload)
            if verdict in (Verdict.GAP, Verdict.RESTART):
                break
            self._take(seq, payload, verdict)
        else:
            number = len(messages)
        self._ranks.apply_waiting()
        return number - start

    async def _take_doubtful(self, message: LiveMessage) -> None:
        """Take one that does not fit, once it is known what happened before it."""
        _, seq, payload = message
        if (
            await self._clear_up(seq, payload, self._continuity.judge(seq, payload))
            and not self._restart_limit.is_exceeded()
        ):
            self._take(seq, payload, self._continuity.judge(seq, payload))
        else:
            self._counters.stale_batches += 1

    def _take(self, seq: int, payload: Payload, verdict: Verdict) -> None:
        self._contradictions = 0
        self._continuity.came_live(seq, payload)
        if verdict is Verdict.DUPLICATE:
            self._counters.duplicate_batches += 1
        else:
            self._apply(seq, payload)

    async def connected(self, live: zmq.asyncio.Socket) -> None:
        """The connection is there for the first time: what did the engine send before? live: as for `check`."""
        self._no_replay_before = -math.inf
        await self.check(live)

    async def check(self, live: zmq.asyncio.Socket | None = None) -> None:
        """The engine is silent: is that so, or were its last batches lost on the way? live: what comes here says
        more, and is not kept waiting.
        """
        if await self._recover(is_doubtful=False, attempts=1, live=live):
            self.hear(True)

    async def reconnected(self) -> None:
        """The connection was lost and is there again: is it the same incarnation?"""
        self._counters.reconnects += 1
        self.lost_at = None
        self._no_replay_before = -math.inf
        self.hear(False)
        if await self._recover(is_doubtful=True):
            self.hear(True)
        elif self._continuity.has_begun:
            self._restart("it was away, and has no replay to tell whether it is the same", is_certain=False)
        await self._ranks.settle()

    async def away(self) -> None:
        """The engine was away for so long that its pages are not to be trusted."""
        if self._continuity.has_begun:
            self._restart("it is away")
            await self._ranks.settle()

    async def close(self, deadline_s: float, *, clear: bool) -> None:
        """Close all streams."""
        await self._ranks.close(deadline_s, clear=clear)

    def status(self) -> list[StreamStatus]:
        """Figures of all ranks."""
        return self._ranks.status()

    # --- what is missing --------------------------------------------------------------------------------------------

    async def _clear_up(self, seq: int, payload: Payload, verdict: Verdict) -> bool:
        """A live batch does not fit. What the engine itself says by a replay is the truth, where it has one.

        False: the batch is left over from an incarnation before, on its way to us when the engine died.
        """
        if time.monotonic() < self._settled_until:
            return False
        had_begun = self._continuity.has_begun
        if not had_begun:
            self._no_replay_before = -math.inf  # whatever failed before, it may be there by now
        self._counters.gaps += had_begun and verdict is Verdict.GAP
        is_complete = await self._recover(is_doubtful=verdict is Verdict.RESTART)
        verdict = self._continuity.judge(seq, payload)
        if verdict in (Verdict.APPLY, Verdict.DUPLICATE):
            return True
        if is_complete:
            self._contradictions += 1
            if self._contradictions <= _MOST_CONTRADICTIONS:
                self._settled_until = time.monotonic() + _SETTLED_S  # what follows it in the queue is as old
                return False
            self._no_replay_before = time.monotonic() + _DISTRUST_S  # it answers for somebody else
        if verdict is Verdict.RESTART:
            self._restart("its numbers went back")
        elif self._continuity.has_begun:
            self._ranks.lose(seq - self._continuity.expected)
        return True

    async def _recover(
        self, *, is_doubtful: bool, attempts: int | None = None, live: zmq.asyncio.Socket | None = None
    ) -> bool:
        """Have everything replayed that is newer than what was applied. Whether an answer came to its end.

        is_doubtful: it may be another incarnation, unless the answer proves the contrary. attempts: in a row that may
        bring nothing. live: ends it as soon as there is something to read.
        """
        if self._replay is None or time.monotonic() < self._no_replay_before or self._restart_limit.is_exceeded():
            return False
        deadline = time.monotonic() + self._deadline_s
        fruitless = restarts = 0
        is_there = True
        while is_there and fruitless < (attempts or self._attempts) and restarts < _MOST_RESTARTS:
            expected, before = self._continuity.expected, self._counters.restarts
            self._counters.replays += 1
            try:
                if await self._replay_once(self._replay, is_doubtful, deadline, live):
                    return True
            except ReplayInterruptedError:
                await self._work_off()
                return False
            except ReplayError as error:
                is_there = time.monotonic() < deadline and not isinstance(error, ReplayUnreachableError)
                self._counters.failed_replays += 1
                self._ranks.complain("replay: %s", error)
            await self._work_off()
            num_restarts = self._counters.restarts - before
            is_doubtful = is_doubtful and not num_restarts
            restarts += num_restarts
            fruitless = 0 if self._continuity.expected > expected else fruitless + (not num_restarts)
        self._no_replay_before = time.monotonic() + _REPLAY_PAUSE_S
        return False

    async def _replay_once(
        self, replay: ReplayClient, is_doubtful: bool, deadline: float, live: zmq.asyncio.Socket | None
    ) -> bool:
        """One request. False: to be asked again from where we stand then."""
        continuity = self._continuity
        last = continuity.expected - 1 if continuity.has_begun else None
        position = 0
        async with aclosing(replay.batches(last or 0, deadline, live)) as answer:
            async for seq, payload in answer:
                if position == 0 and last is not None:
                    if not self._is_same_incarnation(seq, payload, is_doubtful):
                        return False
                elif position > 0 and seq > continuity.expected and not self._is_known_hole(seq):
                    return False  # the engine's side dropped a part of the answer
                if seq >= continuity.expected:
                    self._apply(seq, payload)
                    self._counters.replayed_batches += 1
                position += 1
                if position % _BATCHES_AT_A_TIME == 0 or self._ranks.waiting_bytes > _BYTES_AT_A_TIME:
                    await self._work_off()
                    await asyncio.sleep(0)
        if position == 0 and last is not None:
            if is_doubtful or await _keeps_anything(replay, deadline):
                self._restart("it does not know the batch that came last")
            return False
        await self._work_off()
        return True

    def _is_same_incarnation(self, seq: int, payload: Payload, is_doubtful: bool) -> bool:
        """Judge the first batch of an answer that was asked for from the last one applied."""
        continuity = self._continuity
        if seq < continuity.expected:
            if not continuity.is_last_applied(payload):
                self._restart("a number came again with another content")
                return False
            return True
        if is_doubtful:
            self._restart("it does not keep the batch that came last")
            return False
        if seq > continuity.expected:
            self._ranks.lose(seq - continuity.expected)
        return True

    def _is_known_hole(self, seq: int) -> bool:
        """An answer goes on behind a hole. One that is there a second time is in the engine's buffer: given up."""
        if self._hole_at != self._continuity.expected:
            self._hole_at = self._continuity.expected
            return False
        self._ranks.lose(seq - self._continuity.expected)
        return True

    def _restart(self, why: str, *, is_certain: bool = True) -> None:
        self._counters.restarts += 1
        log.info("engine %s: taken for restarted: %s", self._name, why)
        self._continuity.restart()
        self._hole_at = -1
        if self._restart_limit.restarted():
            log.warning("engine %s", self.failure)
            self.hear(False)
        self._ranks.restart(is_certain=is_certain)

    async def _work_off(self) -> None:
        """Apply what was taken, in a thread if it is much; start and close what that takes."""
        await self._workers.run(self._ranks.waiting_bytes, self._ranks.apply_waiting)
        await self._ranks.settle()

    def _apply(self, seq: int, payload: Payload) -> None:
        """The next batch."""
        if not self._continuity.has_begun and seq > _HIGHEST_FIRST:
            self._ranks.begin_late()
        self._continuity.applied(seq, payload)
        self._ranks.take(seq, payload)


async def _keeps_anything(replay: ReplayClient, deadline: float) -> bool:
    """Whether an engine's buffer holds any batch at all."""
    async with aclosing(replay.batches(0, deadline)) as answer:
        async for _ in answer:
            return True
    return False
