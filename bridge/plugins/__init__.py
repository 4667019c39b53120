"""Publishers that run inside an engine: vLLM's or SGLang's events go to our sink without ZMQ.

Engines load `kvsight.plugins`, which makes an `engine_publisher.EnginePublisher` when one is asked for. Imports
`hashes` and `decoding`.
"""

from __future__ import annotations

from bridge.plugins.engine_publisher import EnginePublisher

__all__ = ["EnginePublisher"]
