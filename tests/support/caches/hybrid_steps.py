"""Short functions for tests of a HiMambaRadixCache on a `HybridRig`: events, nodes and initial trees."""

from __future__ import annotations

from engine_cache import EvictParams
from kv_events.schema import StorageMedium

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def stored(medium, *pages):
    return [("BlockStored", medium, list(page)) for page in pages]


def removed(medium, count=1):
    return count * [("BlockRemoved", medium, None)]


def node_of(rig, tokens):
    """Return the node that ends where `tokens` end."""
    ((node, _),) = [(node, raw) for node, _, raw in rig.walk() if raw[-1] == tuple(tokens)]
    return node


def two_turns(rig):
    """Insert [1, 2] and [1, 2, 3, 4] with a state each. Returns the inner node and the leaf."""
    rig.insert([1, 2])
    rig.insert([1, 2, 3, 4])
    rig.settle()
    rig.cache.take_events()
    return node_of(rig, [1, 2]), node_of(rig, [1, 2, 3, 4])


def tombstone_and_leaf(rig):
    """Insert [1, 2] without a state above [3, 4] with one."""
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2])
    rig.settle()
    rig.cache.take_events()
    return node_of(rig, [1, 2]), node_of(rig, [1, 2, 3, 4])


def demoted(rig, tokens):
    rig.insert(tokens)
    rig.settle()
    rig.cache.evict(EvictParams(100))
    rig.cache.take_events()
