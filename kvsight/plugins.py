"""Entry points by which vLLM and SGLang find kvsight's publisher if both are installed in one environment.

Engines call them in each of their processes, so they import only the engine's own module. `bridge.plugins` is imported
when a publisher is made.

The engines have no public way to replace a publisher, so this module touches the private `_registry` of their class
`EventPublisherFactory`: a dictionary of publisher name -> class or function, in both engines.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_events.errors import KvsightError
from kv_events.runtime.settings import KvsightSettings

if TYPE_CHECKING:
    from bridge.plugins import EnginePublisher

VLLM_MODULE = "vllm.distributed.kv_events"
SGLANG_MODULE = "sglang.srt.disaggregation.kv_events"
PUBLISHER = "kvsight"
"""Name of the publisher in an engine's events config."""

_PACKAGES = ("kv_events", "publisher", "bridge")
"""What a publisher inside an engine consists of."""


class PluginSettings(KvsightSettings):
    """`KVSIGHT_*` variables of the entry points."""

    replace_zmq: bool = False
    """Use kvsight's publisher if the engine's config says `zmq`. vLLM's config accepts no other name."""


class EngineFactoryError(KvsightError):
    """The engine's publisher factory is not as kvsight knows it."""


class ShadowedPackageError(KvsightError):
    """Another package has the name of one of ours, so a publisher cannot be made."""


def register_with_vllm() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    register(publisher_factory(VLLM_MODULE))


def register_with_sglang() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    register(publisher_factory(SGLANG_MODULE))


def register(factory: Any) -> None:
    """Register our publisher with an engine's `EventPublisherFactory`. Calling it again is harmless."""
    set_publisher(factory, PUBLISHER, make_publisher, replace=False)
    if PluginSettings().replace_zmq:
        set_publisher(factory, "zmq", make_publisher, replace=True)


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


def make_publisher(**options: Any) -> EnginePublisher:
    """Make a publisher. Called by a factory with the rank and with the options of the engine's config.

    Raises ShadowedPackageError, InvalidValueError.
    """
    for name in _PACKAGES:
        check_is_ours(name)
    from bridge.plugins import EnginePublisher

    return EnginePublisher(**options)


def check_is_ours(name: str) -> None:
    """Raise ShadowedPackageError unless a package of this name is the one that was installed with kvsight."""
    ours = Path(__file__).resolve().parent.parent / name
    spec = find_spec(name)
    found = None
    if spec is not None:
        found = next(iter(spec.submodule_search_locations or ()), spec.origin)
    if found is None or Path(found).resolve() != ours:
        raise ShadowedPackageError(
            f"kvsight's publisher needs its own package {name!r} at {ours}, but Python finds {found or 'none'}: "
            "rename the other one or move it out of sys.path"
        )
