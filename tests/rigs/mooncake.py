"""Caches of every kind on one Mooncake store, each with its own client."""

import secrets
from contextlib import contextmanager

from engine_cache.storage.mooncake import MooncakeStorage
from engine_cache.storage.object_names import PageLayout, StorageIdentity
from tests.models.event_replay import Replay
from tests.rigs.cache import EXTERNAL, CacheRig

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
PAGE_SIZE = 2
KINDS = {
    "mha": ("hiradix", "mha"),
    "mla": ("hiradix", "mla"),
    "hybrid": ("himamba", "mha"),
    "nsa": ("hiradix+indexer", "mla"),
    "swa": ("unified+swa", "mha"),
}


def own_identity(**fields):
    """Return an identity that no other test uses."""
    layout = PageLayout("int64", PAGE_SIZE, (2, 1, 1), fields.pop("host_layout", "page_first"))
    return StorageIdentity("org/model", layout, extra_backend_tag=f"t{secrets.token_hex(5)}", **fields)


def make_rig(kind, layout="page_first", **options):
    """Return a rig without a store. kind: one of `KINDS`."""
    name, pools = KINDS[kind]
    return CacheRig(name, page_size=PAGE_SIZE, pools=pools, layout=layout, **options)


@contextmanager
def engine(kind, identity, settings, **options):
    """A cache on the store. The client is closed at the end of the block."""
    store = MooncakeStorage.connect(identity, settings)
    try:
        yield attach(make_rig(kind, identity.layout.host_layout, **options), store)
    finally:
        store.close()


def attach(rig, store):
    rig.replay = Replay(PAGE_SIZE)
    follow(rig)
    rig.store = store
    return rig.attach(store, PAGE_SIZE, stop="wait_complete", batch_pages=2, emit_storage_events=True)


def follow(rig):
    """Apply the events since the last call. Returns the pages on the store by (namespace, hash)."""
    for event in rig.cache.take_events():
        rig.replay.apply(event)
    return set(rig.replay.pages[EXTERNAL])


def archive(rig, tokens=PROMPT):
    """Compute a prompt and wait until it is archived."""
    rig.insert(tokens)
    rig.settle()


def prefetch(rig, tokens=PROMPT, req_id="r"):
    """Prefetch a prompt of which nothing is cached and wait for the end. Returns the units added to the tree."""
    rig.cache.prefetch_from_storage(req_id, rig.cache.root_node, tokens)
    rig.engine.drain()
    rig.cache.check_hicache_events()
    assert rig.cache.check_prefetch_progress(req_id)
    rig.settle()
    return rig.cache.pop_prefetch_loaded_tokens(req_id)


def load_back(rig, tokens=PROMPT):
    """Load back what the host holds of a prompt. Returns the number of units on the host."""
    length = rig.match(tokens).host_hit_length
    rig.load(tokens)
    rig.settle()
    return length
