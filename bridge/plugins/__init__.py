"""Publishers that run inside an engine, in place of its own: vLLM's or SGLang's events to our sink, without ZMQ.

`engine_publisher.EnginePublisher` is what their factories make. They learn of it by `kvsight.plugins`, which loads
nothing of this package until a publisher is asked for.
"""

from __future__ import annotations

from bridge.plugins.engine_publisher import EnginePublisher

__all__ = ["EnginePublisher"]
