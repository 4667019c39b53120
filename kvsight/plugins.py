"""Entry points by which vLLM and SGLang find kvsight's publisher, where both are installed in one environment.

Engines call them in each of their processes, so they load nothing but the engine's own module; `bridge.plugins` is
loaded when a publisher is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kv_events.settings import KvsightSettings

if TYPE_CHECKING:
    from bridge.plugins import EnginePublisher

PUBLISHER = "kvsight"
"""Its name in an engine's events config."""


class PluginSettings(KvsightSettings):
    """`KVSIGHT_*` variables of the entry points."""

    replace_zmq: bool = False
    """Make ours where the config says `zmq`. vLLM's config accepts no other name."""


def register_with_vllm() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    register(import_module("vllm.distributed.kv_events").EventPublisherFactory)


def register_with_sglang() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    register(import_module("sglang.srt.disaggregation.kv_events").EventPublisherFactory)


def register(factory: Any) -> None:
    """Have an engine's `EventPublisherFactory` make ours. Calling it again is harmless."""
    if PUBLISHER not in factory._registry:
        factory.register_publisher(PUBLISHER, make_publisher)
    if PluginSettings().replace_zmq:
        factory._registry["zmq"] = make_publisher


def make_publisher(**options: Any) -> EnginePublisher:
    """What a factory calls: with the rank, and the options of the engine's config."""
    from bridge.plugins import EnginePublisher

    return EnginePublisher(**options)
