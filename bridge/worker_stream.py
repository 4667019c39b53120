"""One worker's stream: a translator for its events, and one publisher for each incarnation of its engine."""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from bridge.context import EngineContext
from bridge.decoding.events import ClearedRun, InvalidEvent, Run
from bridge.hashes.event_translator import EventTranslator
from kv_events.schema import BATCHES_LOST, ENGINE_UNHEARD, PAGES_LEFT_OUT, REPLAYING
from kv_events.streams import StreamId
from publisher.publisher import EventPublisher, PublisherStats

_OLD_DEADLINE_S = 0.2
"""For the events that an old incarnation has still queued."""


class StreamStatus(NamedTuple):
    stream: StreamId
    block_size: int | None
    """None until the first store arrives, unless it was registered."""
    epoch: int | None
    publisher: PublisherStats | None
    """None until the block size is known."""
    names: int
    """Pages whose hashes are remembered for all streams of the worker."""

    @property
    def pages_held(self) -> int:
        return 0 if self.publisher is None else self.publisher.pages["held"]


class EngineState(NamedTuple):
    """What all streams of an engine have in common."""

    is_receiving: bool = False
    """Whether messages of the engine arrive."""
    is_replaying: bool = False
    """Whether its events are of the past."""


class WorkerStream:
    """Applies one worker's events.

    Only `start_and_close_publishers` and `close` wait. An owner without an event loop calls `take_publishers` instead.
    """

    def __init__(self, stream: StreamId, context: EngineContext, state: EngineState) -> None:
        self.stream = stream
        self.is_replaced = False
        """Whether another engine was registered under this name. The stream must then be closed and not be used."""
        self._state = state
        self.is_incomplete = False
        """Whether the engine may hold pages that its events since then did not name."""
        self._num_lost = 0  # batches that are known to be missing
        self._num_left_out = 0  # pages, as the degraded reason says
        self.translator = EventTranslator(stream, context)
        self._update_degraded_reason()

    def apply(self, run: Run) -> None:
        """Apply one run of events, at once or in `end_batch`."""
        self.translator.apply(run)
        if isinstance(run, ClearedRun):
            self.is_incomplete, self._num_lost = False, 0
        elif isinstance(run, InvalidEvent) and run.may_remove:
            self.mark_incomplete()

    def end_batch(self) -> Iterator[None]:
        """Apply what waited for the end of the engine's batch, in steps."""
        yield from self.translator.end_batch_in_steps()
        self._update_degraded_reason()

    def set_state(self, state: EngineState) -> None:
        self._state = state
        self._update_degraded_reason()

    def mark_incomplete(self) -> None:
        """Note that batches before the next one are missing. The engine may hold unknown pages until it clears all."""
        self.is_incomplete = True
        self._update_degraded_reason()

    def drop_all_pages(self, num_batches: int = 0) -> None:
        """Note that batches were lost: drop all pages, as some may have been removed. 0: their number is unknown."""
        self.translator.clear()
        self._num_lost += num_batches
        self.mark_incomplete()

    def restart(self, *, is_certain: bool) -> None:
        """Drop all pages and begin a new epoch. is_certain: see `EventTranslator.restart`."""
        self.is_incomplete, self._num_lost = False, 0
        self.translator.restart(is_certain=is_certain)
        self._update_degraded_reason()

    def take_publishers(self) -> tuple[list[EventPublisher], list[EventPublisher]]:
        """Return publishers that are to be started, and others that are to be closed."""
        taken = self.translator.unstarted, self.translator.retired
        self.translator.unstarted, self.translator.retired = [], []
        return taken

    async def start_and_close_publishers(self) -> None:
        unstarted, retired = self.take_publishers()
        for new in unstarted:
            await new.start()
        for old in retired:
            is_group = old.stream != self.stream  # which the engine may have lost
            await old.aclose(_OLD_DEADLINE_S, ends_stream=is_group)

    async def close(self, deadline_s: float, *, clear: bool) -> None:
        """Publish what is queued for at most `deadline_s`. clear: first publish that the worker holds no pages."""
        await self.start_and_close_publishers()
        if clear:
            self.translator.clear()
        closing = [
            each.aclose(deadline_s, ends_stream=not self.is_replaced or each.stream != self.stream)
            for each in self.translator.publishers
        ]
        await asyncio.gather(*closing)

    def status(self) -> list[StreamStatus]:
        size, names = self.translator.block_size, self.translator.num_remembered
        own = StreamStatus(self.stream, size, None, None, names)
        found = [
            StreamStatus(each.stream, size, each.epoch, each.stats(), names) for each in self.translator.publishers
        ]
        return found or [own]

    def _update_degraded_reason(self) -> None:
        reason = self._degraded_reason()
        for publisher in self.translator.publishers:
            publisher.set_degraded_reason(reason)

    def _degraded_reason(self) -> str:
        if not self._state.is_receiving:
            return ENGINE_UNHEARD
        if self.is_incomplete:
            return f"{BATCHES_LOST}: {self._num_lost}" if self._num_lost else BATCHES_LOST
        if self._state.is_replaying:
            return REPLAYING
        left_out = self.translator.num_left_out
        if not 0 < self._num_left_out <= left_out < 2 * self._num_left_out:
            self._num_left_out = left_out  # each change costs a record
        return self.translator.problem or (f"{PAGES_LEFT_OUT}: {self._num_left_out}" if left_out else "")
