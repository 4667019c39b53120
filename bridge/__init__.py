"""Publishes the cache events of engines that run already: vLLM, SGLang, Mooncake, and others of their protocol.

A message passes through three rooms. `stream` receives it and puts batches in order, `decoding` turns bytes into
columns, and `hashes` turns engine hashes into sequence hashes and hands pages to an `EventPublisher`. There is one
publisher for each worker stream; all share one sink. Shapes of messages are detected, never configured.

Start at `fleet.Fleet`, then `engine` and `stream.engine_stream`. `registry` knows the owner of each worker stream.
`plugins` runs inside engines and needs no socket. Imports `publisher` and `kv_events`.
"""

from bridge.engine import EngineStatus as EngineStatus
from bridge.fleet import EngineConflictError as EngineConflictError
from bridge.fleet import Fleet as Fleet
from bridge.settings import BridgeSettings as BridgeSettings
from bridge.settings import EngineSettings as EngineSettings
from bridge.settings import engines_of as engines_of
from bridge.settings import parse_engine as parse_engine
from bridge.settings import read_engines as read_engines
from bridge.stream.subscriber import ConnectionState as ConnectionState
from bridge.worker_stream import StreamStatus as StreamStatus
