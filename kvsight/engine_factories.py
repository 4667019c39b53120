"""The publisher factories of vLLM and SGLang, which have no public way to replace a publisher.

This is the only module that touches their private `_registry`. Both engines define it in the same way: a dictionary of
publisher name -> class or function, as an attribute of the class `EventPublisherFactory`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kv_events.errors import KvsightError

VLLM_MODULE = "vllm.distributed.kv_events"
SGLANG_MODULE = "sglang.srt.disaggregation.kv_events"


class EngineFactoryError(KvsightError):
    """The engine's publisher factory is not as kvsight knows it."""


def publisher_factory(module: str) -> Any:
    """Import the class `EventPublisherFactory` of an engine's module. Raises ImportError, EngineFactoryError."""
    factory = getattr(import_module(module), "EventPublisherFactory", None)
    if factory is None:
        raise EngineFactoryError(f"{module} has no class EventPublisherFactory: this engine's version is not supported")
    return factory


def set_publisher(factory: Any, name: str, make: Callable[..., Any], *, replace: bool) -> None:
    """Let a factory call `make` for publishers of this name. replace: also if it has another one of the name.

    Raises EngineFactoryError, without any change, if the factory has no dictionary `_registry`.
    """
    registry = getattr(factory, "_registry", None)
    if not isinstance(registry, dict):
        where = f"{getattr(factory, '__module__', '?')}.{getattr(factory, '__qualname__', factory)}"
        raise EngineFactoryError(f"{where} has no dictionary _registry: this engine's version is not supported")
    if replace or name not in registry:
        registry[name] = make
