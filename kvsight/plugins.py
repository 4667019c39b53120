"""Entry points through which vLLM and SGLang find kvsight's publisher when both are installed in one environment.

Engines call them in each of their processes, so they load only the engine's own module. `bridge.plugins` is loaded when
a publisher is created.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kv_events.settings import KvsightSettings

if TYPE_CHECKING:
    from bridge.plugins import EnginePublisher

PUBLISHER = "kvsight"
"""The publisher's name in an engine's events config."""


class PluginSettings(KvsightSettings):
    """`KVSIGHT_*` variables of the entry points."""

    replace_zmq: bool = False
    """Also replace the publisher that the config calls `zmq`. vLLM's config accepts no other name."""


def register_with_vllm() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    register(import_module("vllm.distributed.kv_events").EventPublisherFactory)


def register_with_sglang() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    register(import_module("sglang.srt.disaggregation.kv_events").EventPublisherFactory)


def register(factory: Any) -> None:
    """Register our publisher with an engine's `EventPublisherFactory`. Repeated calls have no effect."""
    if PUBLISHER not in factory._registry:
        factory.register_publisher(PUBLISHER, make_publisher)
    if PluginSettings().replace_zmq:
        factory._registry["zmq"] = make_publisher


def make_publisher(**options: Any) -> EnginePublisher:
    """Called by the engine's factory with the rank and the options of the engine's config."""
    from bridge.plugins import EnginePublisher

    return EnginePublisher(**options)
