"""One worker's stream: a translator for its events, and one publisher for each incarnation of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bridge.counters import BridgeCounters
from bridge.decoding.events import ClearedRun, Run
from bridge.hashes.event_translator import EventTranslator
from bridge.hashes.identity import RegistrationDefaults, StreamIdentity
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kv_events.schema import BATCHES_LOST, ENGINE_UNHEARD, REPLAYING
from kv_events.streams import StreamId, group_model
from publisher.kernels.blocks import BlockTable
from publisher.publisher import EventPublisher, PublisherStats

_OLD_DEADLINE_S = 0.2
"""For the events that an old incarnation has still queued."""


class StreamStatus(NamedTuple):
    """Status of one worker stream or group stream."""

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
        """Distinct pages."""
        return 0 if self.publisher is None else self.publisher.pages["held"]


class StreamContext(NamedTuple):
    """What a worker stream needs of the registry that opened it."""

    new_publisher: Callable[[StreamId, int, BlockTable | None], EventPublisher]
    """(stream, block size, its table of blocks) -> a publisher that is not started."""
    release: Callable[[WorkerStream], None]
    """Called when the stream is closed."""
    ledger_pages: int
    """Most pages that a worker may hold."""
    name_pages: int
    """Most pages that are remembered beyond those held."""


class WorkerStream:
    """Applies one worker's events. `apply` and `restart` never wait; `settle` starts and closes publishers for them."""

    def __init__(
        self,
        home: StreamContext,
        stream: StreamId,
        defaults: RegistrationDefaults,
        counters: BridgeCounters,
        limited_logger: RateLimitedLogger,
    ) -> None:
        self.stream = stream
        self.is_replaced = False
        """Whether another engine was registered under this name. The stream must then be closed and not be used."""
        self._home = home
        self._defaults = defaults
        self._counters = counters
        self._limited_logger = limited_logger
        self._unstarted: list[EventPublisher] = []
        self._retired: list[EventPublisher] = []
        self._spare: EventPublisher | None = None  # made before the block size of its incarnation was known
        self._is_receiving = False
        self._is_replaying = False
        self._is_incomplete = False  # the engine may hold pages that its events since then did not name
        self._translator = self._new_translator()
        self._update_degraded_reason()

    @property
    def problem(self) -> str:
        """See `EventTranslator.problem`."""
        return self._translator.problem

    @property
    def must_end_batch(self) -> bool:
        """See `EventTranslator.must_end_batch`."""
        return self._translator.must_end_batch

    def apply(self, run: Run) -> None:
        """Apply one run of events, at once or in `end_batch`."""
        self._translator.apply(run)
        if isinstance(run, ClearedRun):
            self._is_incomplete = False

    def end_batch(self) -> Iterator[None]:
        """Apply what waited for the end of the engine's batch, in steps."""
        yield from self._translator.end_batch_in_steps()
        self._update_degraded_reason()

    def set_receiving(self, is_receiving: bool) -> None:
        """Note whether messages of the engine arrive. False at first."""
        self._is_receiving = is_receiving
        self._update_degraded_reason()

    def set_replaying(self, is_replaying: bool) -> None:
        """Note whether the events are of the past. False at first."""
        self._is_replaying = is_replaying
        self._update_degraded_reason()

    def begin_late(self) -> None:
        """Note that batches before the next one are missing. The engine may hold unknown pages until it clears all."""
        self._is_incomplete = True
        self._update_degraded_reason()

    def lose(self) -> None:
        """Note that batches were lost: drop all pages, because some may have been removed."""
        self._translator.clear()
        self.begin_late()

    def restart(self, *, is_certain: bool) -> None:
        """Drop all pages and begin a new epoch at once, with the old block size until a store proves another one.

        is_certain: whether the engine surely restarted. If not, its hashes are kept, because the same engine may go on
        to name pages by them.
        """
        old = self._translator.publisher
        self._is_incomplete = False
        if old is not None and old is not self._spare:  # a spare one has published nothing yet
            if is_certain:
                self._forget(old.block_size)
            else:
                self._translator.replace_publisher(old.block_size)
        self._update_degraded_reason()

    async def settle(self) -> None:
        """Start new publishers and close those of old incarnations."""
        while self._unstarted:
            await self._unstarted.pop(0).start()
        while self._retired:
            old = self._retired.pop()
            await old.aclose(_OLD_DEADLINE_S, goodbye=old.stream != self.stream)  # the engine may have lost the group

    async def close(self, deadline_s: float, *, clear: bool) -> None:
        """Publish what is queued for at most `deadline_s`. clear: first publish that the worker holds no pages."""
        try:
            await self.settle()
            if clear:
                self._translator.clear()
            await asyncio.gather(
                *(
                    each.aclose(deadline_s, goodbye=not self.is_replaced or each.stream != self.stream)
                    for each in self._translator.publishers
                )
            )
        finally:
            self._home.release(self)

    def status(self) -> list[StreamStatus]:
        """Current status of the stream and of its group streams."""
        size, names = self._translator.block_size, self._translator.num_remembered
        own = StreamStatus(self.stream, size, None, None, names)
        found = [
            StreamStatus(each.stream, size, each.epoch, each.stats(), names) for each in self._translator.publishers
        ]
        return found or [own]

    def _update_degraded_reason(self) -> None:
        reason = self._degraded_reason()
        for publisher in self._translator.publishers:
            publisher.set_degraded_reason(reason)

    def _degraded_reason(self) -> str:
        if not self._is_receiving:
            return ENGINE_UNHEARD
        if self._is_incomplete:
            return BATCHES_LOST
        return REPLAYING if self._is_replaying else self._translator.problem

    def _forget(self, block_size: int) -> None:
        """Begin with an empty translator, and with a publisher whose block size is not certain yet."""
        self._translator.close()
        self._translator = self._new_translator()
        if self._translator.publisher is None:
            self._spare = self._translator.open_publisher(block_size)

    def _new_translator(self) -> EventTranslator:
        own = self._defaults
        return EventTranslator(
            StreamIdentity(self.stream.model, self.stream.tenant, own.lora_name, own.cache_salt, own.rules),
            self._counters,
            self._limited_logger,
            self._publisher_of_size,
            self._retired.append,
            block_size=self._defaults.block_size,
            ledger_pages=self._home.ledger_pages,
            name_pages=self._home.name_pages,
        )

    def _publisher_of_size(self, block_size: int, group: str, blocks: BlockTable | None) -> EventPublisher:
        """The spare publisher if its block size is right, else a new one."""
        stream = self.stream
        if group:
            stream = stream._replace(model=group_model(stream.model, group))
        else:
            spare, self._spare = self._spare, None
            if spare is not None and spare.block_size == block_size:
                return spare
        publisher = self._home.new_publisher(stream, block_size, blocks)
        self._unstarted.append(publisher)
        return publisher
