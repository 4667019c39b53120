"""Events of engines that already run -> the publisher: vLLM, SGLang, Mooncake, and whatever else speaks their protocol.

A message's way: `subscriber` (ZMQ) -> `source` (order, gaps, restarts; `replay`) -> `decoding` (bytes to `runs`) ->
`translate` (sequence hashes) -> `placing` (tiers) -> `EventPublisher`, one for each worker stream, all on one sink.
Start at `fleet.Fleet`, then `source`. Shapes of messages are detected, never configured.
"""

from __future__ import annotations

from bridge.engine import EngineStatus
from bridge.fleet import EngineConflictError, Fleet
from bridge.registry import StreamStatus
from bridge.settings import BridgeSettings, EngineSettings, parse_engine, read_engines
from bridge.stream.subscriber import LinkState

__all__ = [
    "BridgeSettings",
    "EngineConflictError",
    "EngineSettings",
    "EngineStatus",
    "Fleet",
    "LinkState",
    "StreamStatus",
    "parse_engine",
    "read_engines",
]
