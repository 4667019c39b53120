"""Questions and steps that several tests of caches share."""

from engine_cache.base import InitLoadBackParams
from tests.rigs.cache import CacheRig
from tests.rigs.cache_stores import MemoryStorage


def archived(rig, *prompts):
    """Return a store to which another cache of this kind has archived the prompts. The rig is attached to it."""
    store = MemoryStorage()
    writer = CacheRig(rig.name, window=rig.window, swa_pages=8, host_pages=16).attach(store, batch_pages=2)
    writer.turns(*prompts)
    assert writer.cache.detach_storage_backend()[0]
    rig.attach(store, batch_pages=2)
    return store


def on_host(rig, tokens):
    """Return the kinds that the node at the end has on the host."""
    return [kind for kind in ("full", *rig.kinds) if rig.has(tokens, kind)[1]]


def is_free(rig, tokens):
    """Return whether nothing locks the node, or its state."""
    data = rig.data(rig.node_of(tokens), "mamba")
    return (rig.node_of(tokens).lock_ref, data.lock_ref, data.host_lock_ref) == (0, 0, 0)


def holdings(rig):
    """Return all locks, and the free rows of all pools."""
    kinds = ("full", "swa", "mamba")
    nodes = [rig.cache.root_node, *(place.node for place in rig.walk())]
    locks = [[(rig.data(node, kind).lock_ref, rig.data(node, kind).host_lock_ref) for kind in kinds] for node in nodes]
    return locks, [pool.available_size() for pool in (rig.pool, rig.slots, *rig.host_pools.values())]


def init_load_back(rig, match, quota=None, req=None):
    return rig.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, quota, req))


def in_tree(rig):
    return rig.ends("full") | rig.ends("full", "host_value")


def host_evict(rig, kind, number):
    component = next(each for each in rig.cache.auxiliaries if each.kind.name.lower() == kind)
    return rig.cache.host.leaves.evict_component(component, number)
