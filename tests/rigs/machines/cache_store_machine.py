"""The part of the state machine for a store: archives, prefetches and their events.

The content of the store is read directly (`cache_stores`), which also records what it accepted.
"""

from collections import Counter
from hashlib import sha256
from typing import Any, ClassVar

from engine_cache import Lane, ManualCopyEngine, StoragePolicy
from engine_cache.storage.operations import STOP_POLICIES
from engine_cache.tree.node import iter_nodes
from kv_events.schema import StorageMedium
from tests.models.page_names import block_hash
from tests.rigs.cache_stores import WatchedDirectory, WatchedMemory
from tests.rigs.machines.cache_machine import CacheMachine, operation

CPU, DISK, EXTERNAL = StorageMedium.CPU, StorageMedium.DISK, StorageMedium.EXTERNAL
_NAMESPACES = {"": None, sha256(b"a").hexdigest()[:16] + "_": "a"}  # by the prefix before the block hash in a key


def has_store(machine):
    return machine.store is not None


def has_prefetch(machine):
    return bool(machine.cache.ongoing_prefetch)


def is_stepped(machine):
    return isinstance(machine.engine, ManualCopyEngine)


class StorageMachine(CacheMachine):
    STORES: ClassVar[tuple[str, ...]] = ("memory", "directory")
    """Kinds that are attached at run time."""
    TIERS = 2

    def begin(self, store="memory", stop="best_effort", emit=True, **options):
        super().begin(**options)
        self.num_requests = self.num_stores = self.num_fetched = 0
        self.facts = dict[Any, Any]()  # expected event fields of the pages seen
        self.fetched = list[Any](), None  # the prompt of the last prefetch
        self.anchored = {}  # request -> rows of the start node that its prefetch needs
        self.on_host = set()  # pages on the host before the events that are applied
        self.store = None
        self.forget_store()
        if store is not None:
            self.attach(store, stop, emit)

    # --- operations ---

    @operation(weight=4)
    def prefetch(self, draw):
        tokens, extra_key = self.fetched = self.archived_prompt(draw)
        anchor = self.checked_match(tokens, extra_key).last_host_node
        start = sum(len(node.key) for node in self.rig.up(anchor))
        self.num_requests += 1
        self.cache.prefetch_from_storage(str(self.num_requests), anchor, tokens[start:], extra_key=extra_key)

    def archived_prompt(self, draw):
        """Draw a prompt. For most of them, the store holds more than the host."""
        if self.store is not None and draw.random() < 0.8:
            held, on_host = self.store.held(), self.rig.held(CPU)
            beyond = [prefix for prefix in self.seen - on_host if self.key_of(*prefix) in held]
            if beyond:
                candidates = draw.choices(sorted(beyond, key=str), k=3)
                extra_key, raw = max(candidates, key=lambda prefix: len(prefix[1]))  # may end with a state
                return list(raw), extra_key
        return self.prompt(draw)

    @operation(weight=3, when=has_store)
    def prefetch_to_the_end(self, draw):
        """Prefetch without other operations in between, so that all stored pages arrive."""
        self.prefetch(draw)
        if is_stepped(self):
            self.rig.run(Lane.PREFETCH)
        else:
            self.engine.drain()
        self.cache.check_hicache_events()
        if str(self.num_requests) in self.cache.ongoing_prefetch:
            self.look_at(str(self.num_requests))

    @operation(weight=3, when=has_prefetch)
    def check_prefetch_progress(self, draw):
        self.look_at(draw.choice(list(self.cache.ongoing_prefetch)))

    def look_at(self, request):
        if self.cache.check_prefetch_progress(request):
            assert request not in self.cache.ongoing_prefetch
            units = self.cache.pop_prefetch_loaded_tokens(request)
            assert units % self.page_size == 0
            self.num_fetched += units

    @operation(when=has_prefetch)
    def abort(self, draw):
        self.cache.release_aborted_request(draw.choice(list(self.cache.ongoing_prefetch)))

    @operation(when=has_store)
    def the_store_fails_or_recovers(self, draw):
        pools = tuple(self.rig.controller.group.entries)
        self.store.broken = draw.random() < 0.15
        self.store.full = draw.choice([()] * 10 + [pools, (draw.choice(pools),)])

    @operation(weight=2, when=has_store)
    def the_store_loses_something(self, draw):
        if draw.random() < 0.3:
            self.unnoticed |= self.store.harm(draw)

    @operation(when=has_store)
    def the_store_is_asked_for_everything(self, draw):
        """Query the store for all pages, so that it notices its losses."""
        if not self.store.broken:
            for key in sorted(self.once_archived):
                self.store.batch_exists([key])
            self.unnoticed.clear()
            self.cache.check_hicache_events()
            self.check_events(all_taken=is_stepped(self))

    @operation(when=lambda machine: isinstance(machine.store, WatchedDirectory))
    def another_worker_archives_a_page(self, draw):
        pages = [
            (key, rows)
            for node, extra_key, prefixes in self.rig.walk()
            if node.host_value is not None and node.write_through_pending_id is None
            for key, rows in zip(
                (self.key_of(extra_key, raw) for raw in prefixes),
                node.host_value.reshape(-1, self.page_size),
                strict=True,
            )
        ]
        if pages and draw.random() < 0.3:
            key, rows = draw.choice(pages)
            self.store.neighbour(self.rig.host).batch_set_v1([key], rows)

    def key_of(self, extra_key, raw):
        tag = next(tag for tag, namespace in _NAMESPACES.items() if namespace == extra_key)
        return tag + block_hash(raw, self.page_size, self.rig.is_bigram).hex()

    @operation(when=has_store)
    def clear_storage(self, draw):
        if draw.random() < 0.1:
            self.cache.clear_storage_backend()
            assert not is_stepped(self) or self.store.held() == set()

    @operation(when=lambda machine: machine.STORES)
    def attach_or_detach(self, draw):
        if draw.random() > 0.1 + 0.4 * (self.store is None):
            return
        if self.store is None:
            self.attach(draw.choice(self.STORES), draw.choice(STOP_POLICIES), draw.random() < 0.8)
        elif draw.random() < 0.5:
            self.change_policy(draw.choice(STOP_POLICIES))
        else:
            self.detach()

    def attach(self, kind, stop, emit):
        self.store = self.make_store(kind)
        self.emit = emit
        self.num_stores += 1
        assert self.cache.attach_storage_backend(self.store, self.policy(stop)) == (True, "attached")

    def make_store(self, kind):
        if kind == "memory":
            return WatchedMemory()
        pools = [entry.host_pool for entry in self.rig.controller.group.entries.values()]
        return WatchedDirectory(self.rig.identity, pools, num_pages=12)

    def change_policy(self, stop):
        assert self.cache.attach_storage_backend(self.store, self.policy(stop))[0]

    def policy(self, stop):
        """Draw a policy whose time limit is reached at once or never."""
        limit_s = 1000 * (self.num_requests % 2)
        return StoragePolicy(1, stop, limit_s, 0, limit_s, batch_pages=2, emit_storage_events=self.emit)

    def detach(self):
        assert self.cache.detach_storage_backend() == (True, "detached")
        self.store.discard()
        self.store = None
        self.forget_store()

    def forget_store(self):
        """Forget everything announced about the store."""
        if self.store is not None:
            self.store.acknowledged.clear()
        self.archived = set()  # keys that were archived successfully and have been held since
        self.once_archived = set()  # archived keys that may have been lost
        self.unnoticed = set()  # keys that were lost without the store's knowledge

    # --- invariants ---

    def check_host_references(self):
        """Check that only prefetches and archives hold host references. Only a start node whose own backup failed may
        leave the tree."""
        nodes = [self.cache.root_node, *iter_nodes(self.cache.root_node)]
        archives = Counter(self.cache.ongoing_backup.values())
        assert archives.keys() <= set(nodes)
        assert all(node.host_value is not None for node in archives)
        anchors = Counter(operation.start_node for operation in self.cache.ongoing_prefetch.values())
        assert all(node.host_value is None for node in anchors.keys() - set(nodes))
        for node in nodes:
            assert node.host_ref_counter == archives[node] + anchors[node]

    def check_store(self, all_taken):
        """Check that the announced pages are those that this cache has archived and the store holds. There may be more
        until losses are processed, and fewer until archives are acknowledged."""
        if self.store is None or not self.emit:
            assert self.replay.pages[DISK] == self.replay.pages[EXTERNAL] == {}
            return
        announced = self.replay.pages[self.store.medium]
        while self.store.acknowledged:
            self.archived.add(self.store.acknowledged.popleft())
        self.once_archived |= self.archived
        assert not self.store.bare
        held = self.store.held()
        self.archived &= held
        self.unnoticed -= held
        in_flight = {key for operation in self.cache.ongoing_backup for key in operation.keys}
        assert announced.keys() >= {_page_of(key) for key in self.archived - in_flight}
        allowed = self.once_archived & (held | self.unnoticed) if all_taken else self.once_archived
        assert announced.keys() <= {_page_of(key) for key in allowed}
        if not announced.keys() <= self.facts.keys():
            self.facts = dict(map(self.names.named, self.seen))
        assert all(self.facts[page] == facts for page, facts in announced.items())


def _page_of(key):
    """Return the hash of a stored page in events."""
    block = int(key[-64:-48], 16)
    return _NAMESPACES[key[:-64]], block - 2**64 * (block >= 2**63)
