"""Short functions for tests of a cache with a store: a prompt, its page hashes, and the steps of a scheduler."""

from __future__ import annotations

from dataclasses import replace

from engine_cache import HostPoolGroup, HybridCacheController, Lane, StoragePolicy
from tests.support.caches.page_names import block_hash
from tests.support.caches.tier_rig import Rig

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def page_hashes(tokens):
    return [block_hash(tuple(tokens[:end]), 2, False).hex() for end in range(2, len(tokens) + 1, 2)]


def hybrid_controller(name, page_size, engine):
    """Return a controller of two pools: KV in pages of two rows, and one other."""
    kv, beside = Rig().controller.kv, Rig(page_size=page_size).controller.kv
    return HybridCacheController(
        HostPoolGroup.of(kv, replace(beside, name=name, is_primary_index_anchor=False)), engine
    )


def attach(rig, store, **policy):
    policy = {"prefetch_threshold": 2, "batch_pages": 2} | policy
    assert rig.cache.attach_storage_backend(store, StoragePolicy(**policy)) == (True, "attached")
    return rig


def prefetch(rig, tokens=PROMPT, req_id="r", **params):
    match = rig.match(tokens)
    anchor, start = match.last_host_node, 0
    node = anchor
    while node is not rig.cache.root_node:
        start, node = start + len(node.key), node.parent
    rig.cache.prefetch_from_storage(req_id, anchor, tokens[start:], **params)
    return rig.cache.ongoing_prefetch.get(req_id)


def run(rig, fast_path=Lane.PREFETCH):
    while rig.engine.step(fast_path):
        pass


def nothing_is_left(rig):
    rig.cache.check_hicache_events()
    nodes = [node for node, _, _ in rig.walk()]
    return (
        rig.cache.prefetch_tokens_occupied == 0
        and not rig.cache.ongoing_prefetch
        and not rig.cache.store.io.prefetches
        and all(node.host_ref_counter == 0 for node in [rig.cache.root_node, *nodes])
    )
