"""One engine's event stream: every batch applied once and in order, and no gap unnoticed."""

import asyncio
import logging
import math
import time
from collections.abc import Generator, Iterator
from contextlib import aclosing

from bridge.context import BridgeCounters
from bridge.decoding.decoder import Messages
from bridge.registry import DecodeThreads
from bridge.stream.messages import Backlog
from bridge.stream.rank_streams import RankStreams
from bridge.stream.replay import (
    ReplayClient,
    ReplayCutError,
    ReplayError,
    ReplayInterruptedError,
    ReplayUnreachableError,
)
from bridge.stream.sequence_check import BatchOrder, RestartLimit, SequenceCheck
from kv_events.engine_wire import Payload

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Consecutive requests without progress after which a replay is abandoned."""
_DEADLINE_S = 60.0
"""Time after which a replay is abandoned in any case: live batches wait for it."""
_MAX_RESTARTS = 3
"""Restarts within one recovery. Beyond, the engine's answers contradict each other; the next batch tries again."""
_BATCHES_AT_A_TIME = 32
_BYTES_AT_A_TIME = 2**18
_REPLAY_PAUSE_S = 10.0
_SETTLED_S = 1.0
_MAX_CONTRADICTIONS = 5
_DISTRUST_S = 60.0
_COST = "missed events cannot be fetched: a gap drops all pages, and after a late start earlier pages are not known"
_HIGHEST_FIRST = 1
"""Engines count from 0, a Mooncake master from 1."""


class EngineStream:
    """State of one engine's stream. Only one task at a time may call it, except for `status`."""

    def __init__(
        self, ranks: RankStreams, threads: DecodeThreads, counters: BridgeCounters, replay: ReplayClient | None
    ) -> None:
        self.last_message_at = time.monotonic()
        """Time of the last batch, or of creation. By `time.monotonic()`."""
        self.connection: int | None = None
        """File descriptor of the connection that the last batch arrived over."""
        self.lost_at: float | None = None
        """When that connection was lost; None while it is open."""
        self.replay_failure: str | None = None
        """Why the last replay failed; None if it did not. Live batches are applied all the same."""
        self._name = ranks.key
        self.ranks = ranks
        self._counters = counters
        self._replay = replay
        self._threads = threads
        self._sequence = SequenceCheck()
        self._no_replay_before = -math.inf  # pause after a replay socket failed
        self._settled_until = -math.inf  # until then, batches out of order are stale
        self._contradictions = 0  # consecutive live batches that the engine's replay does not have
        self._hole_at = -1  # number of a batch that an answer skipped
        self._restart_limit = RestartLimit()

    @property
    def failure(self) -> str | None:
        """Why nothing is published at present; None if all is well."""
        if self._restart_limit.is_exceeded():
            return f"{self._name}: restarted so often that it is left out: are there several publishers on its address?"
        return self.ranks.failure

    async def open(self) -> None:
        """Begin to listen. When listening again, first recover what was missed in between."""
        await self.ranks.start_and_close_publishers()
        if not self._sequence.has_begun:
            return
        if await self._recover(may_be_new=True, attempts=1):
            self.set_receiving(True)
        else:
            self._restart("the bridge was not listening for a while", is_certain=False)

    def set_receiving(self, is_receiving: bool) -> None:
        """Note whether messages of the engine arrive. False at first, and after an outage until the next message."""
        self.ranks.set_state(is_receiving=is_receiving and not self._restart_limit.is_exceeded())

    async def take_live(self, messages: Messages) -> None:
        """Apply the next batches of the live stream, in order. They are not used after the call."""
        taken = 0
        self.last_message_at = time.monotonic()
        while taken < len(messages) and not self._restart_limit.is_exceeded():
            taken += await self._threads.run(messages.num_bytes, self._take_in_order(messages, taken))
            if taken < len(messages):
                await self._take_out_of_order(*messages.one(taken))
                taken += 1
                await self._apply_waiting()
                await asyncio.sleep(0)
        self._counters.stale_batches += len(messages) - taken
        await self.ranks.start_and_close_publishers()

    def _take_in_order(self, messages: Messages, start: int) -> Generator[None, None, int]:
        """Apply batches while they are in order. Returns how many. Yields after each step, which any thread may do."""
        number = start
        while number < len(messages):
            if num_next := self._sequence.num_in_order(messages.seqs[number:]):
                yield from self._take_next(messages.part(number, number + num_next))
                number += num_next
            else:
                seq, payload = messages.one(number)
                order = self._sequence.classify(seq, payload)
                if order in (BatchOrder.GAP, BatchOrder.RESTART):
                    break
                self._take(seq, payload, order)
                number += 1
        yield from self.ranks.apply_waiting()
        return number - start

    def _take_next(self, messages: Messages) -> Iterator[None]:
        self._contradictions = 0
        self._sequence.applied_live(*messages.one(len(messages) - 1))
        return self.ranks.apply(messages)

    async def _take_out_of_order(self, seq: int, payload: Payload) -> None:
        """Apply a batch that is out of order, after finding out what happened before it."""
        if (
            await self._resolve(seq, payload, self._sequence.classify(seq, payload))
            and not self._restart_limit.is_exceeded()
        ):
            self._take(seq, payload, self._sequence.classify(seq, payload))
        else:
            self._counters.stale_batches += 1

    def _take(self, seq: int, payload: Payload, order: BatchOrder) -> None:
        self._contradictions = 0
        self._sequence.note_live(seq, payload)
        if order is BatchOrder.DUPLICATE:
            self._counters.duplicate_batches += 1
        else:
            self._apply(seq, payload)

    async def connected(self, live: Backlog) -> None:
        """Recover what the engine sent before its first connection. live: see `check`."""
        self._no_replay_before = -math.inf
        await self.check(live)

    async def check(self, live: Backlog | None = None) -> None:
        """Ask a silent engine whether its last batches were lost on the way.

        live: the live stream. A message ends the check, because it answers the question.
        """
        if await self._recover(may_be_new=False, attempts=1, live=live):
            self.set_receiving(True)

    async def reconnected(self) -> None:
        """Find out whether the engine behind a new connection is the same incarnation as before."""
        self._counters.reconnects += 1
        self.lost_at = None
        self._no_replay_before = -math.inf
        self.set_receiving(False)
        if await self._recover(may_be_new=True):
            self.set_receiving(True)
        elif self._sequence.has_begun:
            self._restart(
                "the connection was lost, and no replay shows whether it is the same engine", is_certain=False
            )
        await self.ranks.start_and_close_publishers()

    async def expire(self) -> None:
        """Give up the engine's pages after a long outage."""
        if self._sequence.has_begun:
            self._restart("the connection is lost for too long")
            await self.ranks.start_and_close_publishers()

    # --- missing batches --------------------------------------------------------------------------------------------

    async def _resolve(self, seq: int, payload: Payload, order: BatchOrder) -> bool:
        """Find out why a live batch is out of order. The engine's replay, if it has one, is the authority.

        False: the batch is stale. An earlier incarnation sent it, and it was still on its way when the engine died.
        """
        if time.monotonic() < self._settled_until:
            return False
        had_begun = self._sequence.has_begun
        if not had_begun:
            self._no_replay_before = -math.inf  # the replay socket may be open by now
        self._counters.gaps += had_begun and order is BatchOrder.GAP
        is_complete = await self._recover(may_be_new=order is BatchOrder.RESTART)
        order = self._sequence.classify(seq, payload)
        if order in (BatchOrder.APPLY, BatchOrder.DUPLICATE):
            return True
        if is_complete:
            self._contradictions += 1
            if self._contradictions <= _MAX_CONTRADICTIONS:
                self._settled_until = time.monotonic() + _SETTLED_S  # the messages queued behind it are as old
                return False
            self._no_replay_before = time.monotonic() + _DISTRUST_S  # it belongs to another engine
        if order is BatchOrder.RESTART:
            self._restart("its sequence numbers went back")
        elif self._sequence.has_begun:
            self._drop_missing(seq)
        return True

    async def _recover(self, *, may_be_new: bool, attempts: int | None = None, live: Backlog | None = None) -> bool:
        """Replay all batches newer than the last one applied. Returns whether an answer was complete.

        may_be_new: assume another incarnation unless the answer proves the contrary. attempts: consecutive requests
        that may yield nothing. live: a stream whose messages end the recovery.
        """
        if self._replay is None or time.monotonic() < self._no_replay_before or self._restart_limit.is_exceeded():
            return False
        try:
            return await self._replay_all(self._replay, may_be_new, attempts or _ATTEMPTS, live)
        finally:
            self.ranks.set_state(is_replaying=False)

    async def _replay_all(self, replay: ReplayClient, may_be_new: bool, attempts: int, live: Backlog | None) -> bool:
        deadline = time.monotonic() + _DEADLINE_S
        num_failed = restarts = 0
        is_reachable = True
        while is_reachable and num_failed < attempts and restarts < _MAX_RESTARTS:
            expected, before = self._sequence.expected, self._counters.restarts
            self._counters.replays += 1
            failure = None
            try:
                if await self._replay_once(replay, may_be_new, deadline, live):
                    return True
            except ReplayCutError:
                pass
            except ReplayInterruptedError:
                await self._apply_waiting()
                return False
            except ReplayError as error:
                is_reachable = time.monotonic() < deadline and not isinstance(error, ReplayUnreachableError)
                self._counters.failed_replays += 1
                failure = f"no replay from {error}; {_COST}"
                self.ranks.limited_logger.warning("%s", failure)
            finally:
                self.replay_failure = failure
            await self._apply_waiting()
            num_restarts = self._counters.restarts - before
            may_be_new = may_be_new and not num_restarts
            restarts += num_restarts
            num_failed = 0 if self._sequence.expected > expected else num_failed + (not num_restarts)
        self._no_replay_before = time.monotonic() + _REPLAY_PAUSE_S
        return False

    async def _replay_once(self, replay: ReplayClient, may_be_new: bool, deadline: float, live: Backlog | None) -> bool:
        """Send one request. False: ask again, from the position reached."""
        sequence = self._sequence
        last = sequence.expected - 1 if sequence.has_begun else None
        position = 0
        async with aclosing(replay.batches(last or 0, deadline, live)) as answer:
            async for seq, payload in answer:
                if position == 0 and last is not None:
                    if not self._is_same_incarnation(seq, payload, may_be_new):
                        return False
                elif position > 0 and seq > sequence.expected and not self._is_known_hole(seq):
                    return False  # the engine dropped a part of the answer
                if seq >= sequence.expected:
                    self.ranks.set_state(is_replaying=True)
                    self._apply(seq, payload)
                    self._counters.replayed_batches += 1
                position += 1
                if position % _BATCHES_AT_A_TIME == 0 or self.ranks.waiting_bytes > _BYTES_AT_A_TIME:
                    await self._apply_waiting()
                    await asyncio.sleep(0)
        if position == 0 and last is not None:
            if may_be_new or await _has_batches(replay, deadline):
                self._restart("its replay does not have the last batch")
            return False
        await self._apply_waiting()
        return True

    def _is_same_incarnation(self, seq: int, payload: Payload, may_be_new: bool) -> bool:
        """Judge the first batch of an answer to a request that began with the last batch applied."""
        sequence = self._sequence
        if seq < sequence.expected:
            if not sequence.is_last_applied(payload):
                self._restart("a sequence number came again with different content")
                return False
            return True
        if may_be_new:
            self._restart("its replay begins after the last batch")
            return False
        if seq > sequence.expected:
            self._drop_missing(seq)
        return True

    def _is_known_hole(self, seq: int) -> bool:
        """Whether an answer skipped this batch before. The second time, the engine no longer keeps it: it is lost.

        No batch waits then, because the position is the one that the answer began at.
        """
        if self._hole_at != self._sequence.expected:
            self._hole_at = self._sequence.expected
            return False
        self._drop_missing(seq)
        return True

    def _drop_missing(self, seq: int) -> None:
        """Note that the batches from the expected one up to `seq` are lost."""
        expected = self._sequence.expected
        self.ranks.drop_all_pages(seq - expected, expected, seq - 1)

    def _restart(self, why: str, *, is_certain: bool = True) -> None:
        self._counters.restarts += 1
        logger.info("engine %s: treated as restarted: %s", self._name, why)
        self._sequence.restart()
        self._hole_at = -1
        self.ranks.restart(is_certain=is_certain)
        if self._restart_limit.restarted():
            logger.warning("engine %s", self.failure)
            self.set_receiving(False)  # of the new incarnation, which holds no pages

    async def _apply_waiting(self) -> None:
        await self._threads.run(self.ranks.waiting_bytes, self.ranks.apply_waiting())
        await self.ranks.start_and_close_publishers()

    def _apply(self, seq: int, payload: Payload) -> None:
        if not self._sequence.has_begun and seq > _HIGHEST_FIRST:
            self.ranks.mark_incomplete(0, seq - 1)
        self._sequence.applied(seq, payload)
        self.ranks.take(seq, payload)


async def _has_batches(replay: ReplayClient, deadline: float) -> bool:
    async with aclosing(replay.batches(0, deadline)) as answer:
        async for _ in answer:
            return True
    return False
