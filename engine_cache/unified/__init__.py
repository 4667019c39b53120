"""One tree for all kinds of state that a model may have: full KV, sliding-window KV, recurrent states.

Owns the unified radix cache and its components; stands on the host and storage tiers of `engine_cache`. Start at
`cache.py`; `component.py` says what a kind of state must do to take part.
"""

from engine_cache.unified.cache import UnifiedRadixCache
from engine_cache.unified.component import AuxiliaryComponent, TreeComponent
from engine_cache.unified.full import FullComponent
from engine_cache.unified.mamba import MambaComponent
from engine_cache.unified.node import ComponentType, UnifiedNode
from engine_cache.unified.swa import SWAComponent

__all__ = [
    "AuxiliaryComponent",
    "ComponentType",
    "FullComponent",
    "MambaComponent",
    "SWAComponent",
    "TreeComponent",
    "UnifiedNode",
    "UnifiedRadixCache",
]
