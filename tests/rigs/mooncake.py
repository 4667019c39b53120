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


def make_rig(kind, layout="page_first"):
    """Return a rig without a store. kind: one of `KINDS`."""
    name, pools = KINDS[kind]
    return CacheRig(name, page_size=PAGE_SIZE, pools=pools, layout=layout)


@contextmanager
def engine(kind, identity, settings):
    """A cache on the store. The client is closed at the end of the block."""
    store, rig = MooncakeStorage.connect(identity, settings), make_rig(kind, identity.layout.host_layout)
    rig.replay = Replay(PAGE_SIZE)
    follow(rig)
    try:
        yield rig.attach(store, PAGE_SIZE, stop="wait_complete", batch_pages=2, emit_storage_events=True)
    finally:
        store.close()


def follow(rig):
    """Apply the events since the last call. Returns the pages on the store by (namespace, hash)."""
    for event in rig.cache.take_events():
        rig.replay.apply(event)
    return set(rig.replay.pages[EXTERNAL])


def archive(rig, tokens=PROMPT):
    """Compute a prompt and wait until it is archived."""
    rig.insert(tokens)
    rig.settle()
