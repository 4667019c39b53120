"""What all parts that translate the events of one engine share."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from bridge.counters import BridgeCounters
from bridge.settings import EngineDefaults
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kv_events.streams import StreamId
from publisher.kernels.blocks import BlockTable
from publisher.publisher import EventPublisher

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
