"""What all parts that translate the events of one engine share, and what they count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from bridge.settings import EngineDefaults
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.streams import StreamId
from publisher.kernels.blocks import BlockTable
from publisher.publisher import EventPublisher


@dataclass(slots=True)
class BridgeCounters:
    """Counters of one engine since it was added. Whatever is counted as left out would mislead a router."""

    batches: int = 0
    events: int = 0
    pages_stored: int = 0
    """Passed to the publisher, including pages that it held already."""
    pages_removed: int = 0
    clears: int = 0
    """Clear events of the engine."""

    gaps: int = 0
    """Gaps in the sequence numbers."""
    replays: int = 0
    replayed_batches: int = 0
    failed_replays: int = 0
    duplicate_batches: int = 0
    """Arrived live after a replay."""
    stale_batches: int = 0
    """Arrived live from an earlier incarnation."""
    dropped_batches: int = 0
    """Arrived while too many bytes waited. A gap follows."""
    lost_batches: int = 0
    """Permanently lost."""
    losses: int = 0
    """Times that all pages were dropped because batches were lost."""
    restarts: int = 0
    """Engine incarnations after the first."""
    reconnects: int = 0

    undecodable: int = 0
    """Messages that are not a batch."""
    bad_events: Counter[str] = field(default_factory=Counter)
    """Invalid events, by reason. The rest of their batch is applied."""
    bad_ranks: int = 0
    """Batches with an invalid rank. They count for the registered one."""
    foreign_ranks: int = 0
    """Batches left out because their rank has another owner or is one too many."""
    unknown_media: Counter[str] = field(default_factory=Counter)
    """Pages on unknown media, by name."""
    guessed_salts: int = 0
    """Stores whose cache salt was guessed from an extra key."""
    unknown_parents: int = 0
    """Stored pages whose parent is not known."""
    unresolved_pages: int = 0
    """Stored pages without tokens that are not remembered."""
    other_groups: int = 0
    """Pages of attention groups in which a page does not stand for its whole prefix."""
    other_block_sizes: int = 0
    """Pages of another size than the stream's."""
    partial_pages: int = 0
    """Last pages of a store that were not full."""
    foreign_events: int = 0
    """Events of another model or tenant."""
    refused_spaces: int = 0
    """Pages left out because there are too many attention groups and owners."""

    def copy(self) -> BridgeCounters:
        return replace(self, bad_events=Counter(self.bad_events), unknown_media=Counter(self.unknown_media))


NewPublisher: TypeAlias = Callable[[StreamId, int, BlockTable | None], EventPublisher]
"""(stream or group stream, block size, table of blocks or None for one of its own) -> a publisher, not started"""


class EngineContext(NamedTuple):
    """What is known of an engine, and where its publishers come from."""

    defaults: EngineDefaults
    counters: BridgeCounters
    limited_logger: RateLimitedLogger
    new_publisher: NewPublisher
    """Called again for each later incarnation of the engine."""
    ledger_pages: int
    """Most pages that a publisher holds."""
    name_pages: int
    """Most pages remembered beyond those held."""
