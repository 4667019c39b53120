"""The cost of UnifiedRadixCache by kind of state and set of tiers: `python -m benchmarks.bench_unified [--json FILE]`.

A `UnifiedRadixCache` serves prompts of 64 new pages over real pools with copies on threads. "insert" and "match" are
the tree's own time on its thread, with events on and off in turns. The other figures are whole operations of one
prompt, from the call until the tree has accepted the result, including the state: backup, load-back, archive, and
prefetch when neither tier holds the prompt. The storage backend is a directory or a Mooncake store over TCP on the same
machine. A page has 128 KiB of KV, or 72 KiB of compressed KV.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_storage import mooncake_store
from benchmarks.report import Figure, figure, main, timed
from engine_cache import (
    EvictParams,
    HiCacheController,
    InitLoadBackParams,
    InsertParams,
    MambaComponent,
    MambaSlotAllocator,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixKey,
    Request,
    StoragePolicy,
    SWAComponent,
    SWATokenToKVPoolAllocator,
    UnifiedRadixCache,
)
from engine_cache.components.component import AuxiliaryComponent
from engine_cache.pools.device import HybridLinearKVPool, MHATokenToKVPool, NSATokenToKVPool, PoolShape, SWAKVPool
from engine_cache.pools.mamba import HybridReqToTokenPool, MambaPool
from engine_cache.settings import MooncakeSettings
from engine_cache.stacks import HostTierConfig, PoolSpec, build_hybrid_stack, pools_of
from engine_cache.storage import HiCacheStorage, PageLayout, StorageIdentity
from engine_cache.storage.directory import DirectoryStorage
from engine_cache.storage.mooncake import MooncakeStorage

PAGE, PAGES, SIZE = 16, 64, 4096
LAYERS, HEADS, HEAD_DIM = 4, 4, 128
WINDOW, SLOTS = 512, 8
ROUNDS = 20
VOCABULARY = 128_000
STORE_BYTES = 2**28
LAYOUT = "page_first_direct"
MODELS = ("Full", "Full+Mamba", "Full+SWA", "Full+DSA")
TIERS = ("device", "host", "directory", "Mooncake")

rng = np.random.default_rng(7)


@dataclass(frozen=True)
class Model:
    """One kind of model: its device pools and the components of its tree."""

    name: str
    specs: list[PoolSpec]
    allocator: PagedTokenToKVPoolAllocator | SWATokenToKVPoolAllocator
    components: Sequence[AuxiliaryComponent] = ()
    slots: MambaSlotAllocator | None = None


def make_model(name: str) -> Model:
    rows, shape = PagedTokenToKVPoolAllocator(SIZE, PAGE), PoolShape(SIZE, PAGE, LAYERS, torch.bfloat16)
    if name == "Full+DSA":
        return Model(name, pools_of(NSATokenToKVPool(shape, kv_lora_rank=512, qk_rope_head_dim=64), rows), rows)
    kv = MHATokenToKVPool(shape, HEADS, HEAD_DIM)
    every_other = list(range(0, 2 * LAYERS, 2)), list(range(1, 2 * LAYERS, 2))
    if name == "Full+SWA":
        both = SWATokenToKVPoolAllocator(SIZE, SIZE, PAGE)
        pools = SWAKVPool(kv, MHATokenToKVPool(shape, HEADS, HEAD_DIM), *every_other)
        specs = pools_of(pools, both.full, swa_allocator=both.swa)
        return Model(name, specs, both, [SWAComponent(both, WINDOW)])
    if name == "Full+Mamba":
        slots = MambaSlotAllocator(SLOTS)
        states = MambaPool(SLOTS, LAYERS, [(3, 1024)], (16, 64, 64))
        layers = {layer: own for own, layer in enumerate(every_other[1])}
        requests = HybridReqToTokenPool(2, SIZE, mamba_pool=states, mamba_allocator=slots, mamba_map=layers)
        specs = pools_of(HybridLinearKVPool(kv, every_other[0]), rows, req_pool=requests)
        return Model(name, specs, rows, [MambaComponent(slots, enable_mamba_extra_buffer=True)], slots)
    return Model(name, pools_of(kv, rows), rows)


class Bench:
    """A cache of a model that uses the model's rows alone."""

    def __init__(self, model: Model, opened: ExitStack, *, tiers: str, events: bool) -> None:
        self.model = model
        self.events = events
        self.has_host = tiers != "device"
        if not self.has_host:
            self.cache = self._cache(None)
            return
        config = HostTierConfig(layout=LAYOUT, reserve_bytes=0)
        self.stack = opened.enter_context(build_hybrid_stack(model.specs, self._cache, config=config))
        self.cache = self.stack.cache

    def _cache(self, controller: HiCacheController | None) -> UnifiedRadixCache:
        cache = UnifiedRadixCache(
            page_size=PAGE,
            allocator=self.model.allocator,
            components=self.model.components,
            enable_kv_cache_events=self.events,
        )
        if controller is not None:
            cache.init_hicache(controller, write_policy="write_through_selective", load_back_threshold=1)
        return cache

    def insert(self, key: RadixKey) -> float:
        """Insert a prompt and return the seconds it took."""
        rows = self.model.allocator.alloc(len(key))
        slot = None if self.model.slots is None else self.model.slots.alloc(1)
        assert rows is not None
        spent = timed(lambda: self.cache.insert(InsertParams(key, rows, mamba_value=slot)))
        self.cache.take_events()
        return spent

    def match(self, key: RadixKey) -> float:
        """Match a key, which must be found whole, and return the seconds it took."""
        found: list[int] = []
        params = MatchPrefixParams(key)
        spent = timed(lambda: found.append(len(self.cache.match_prefix(params).device_indices)))
        assert found == [len(key)]
        return spent

    def empty(self) -> None:
        """Evict everything."""
        self.demote()
        if self.has_host:
            self.cache.evict_host(2 * SIZE)
        assert not self.cache.root_node.children
        self.cache.take_events()

    def demote(self) -> None:
        """Evict everything from the device."""
        self.cache.evict(EvictParams(SIZE, SIZE, SIZE))

    def back_up(self, key: RadixKey) -> None:
        node = self.cache.match_prefix(MatchPrefixParams(key)).last_device_node
        assert self.cache.write_backup(node) > 0  # its ancestors first
        self.cache.writing_check(write_back=True)

    def load_back(self, key: RadixKey) -> None:
        match = self.cache.match_prefix(MatchPrefixParams(key))
        req = Request("r", [], 0, last_node=match.last_device_node)
        req.swa_host_hit_length = match.swa_host_hit_length
        req.mamba_host_hit_length = match.mamba_host_hit_length
        params = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
        rows, _ = self.cache.init_load_back(params)
        assert len(rows) == len(key)
        self.cache.ready_to_load_host_cache()
        self.settle()
        if req.mamba_pool_idx is not None and self.model.slots is not None:
            self.model.slots.free(req.mamba_pool_idx)

    def settle(self) -> None:
        self.stack.cache_controller.engine.drain()
        self.cache.check_hicache_events()

    def prefetch(self, key: RadixKey) -> None:
        self.cache.prefetch_from_storage("r", self.cache.root_node, key.token_ids)
        self.settle()
        assert self.cache.check_prefetch_progress("r")
        assert self.cache.pop_prefetch_loaded_tokens("r") == len(key)


def prompt() -> RadixKey:
    return RadixKey(rng.integers(0, VOCABULARY, PAGES * PAGE, dtype=np.uint32))


def bench_combination(
    name: str, tiers: str, open_store: Callable[[StorageIdentity], HiCacheStorage]
) -> Iterator[Figure]:
    """Measure one model on one set of tiers. open_store: opens the storage backend, if there is one."""
    with ExitStack() as opened:
        benches = [Bench(make_model(name), opened, tiers=tiers, events=events) for events in (False, True)]
        if tiers not in ("device", "host"):
            for bench in benches:
                store = open_store(identity_of(name, bench.events))
                opened.callback(store.close)
                opened.callback(store.clear)
                attach(bench, store)
        what = f"{name}, {tiers}"
        yield from bench_tree(what, benches)
        if tiers != "device":
            yield from bench_moves(what, benches[1])


def identity_of(name: str, events: bool) -> StorageIdentity:
    layout = PageLayout("bfloat16", PAGE, (LAYERS, HEADS, HEAD_DIM), LAYOUT)
    return StorageIdentity(name, layout, is_mla=name == "Full+DSA", extra_backend_tag="on" if events else "off")


def attach(bench: Bench, store: HiCacheStorage) -> None:
    policy = StoragePolicy(prefetch_threshold=1, stop="wait_complete", emit_storage_events=True)
    is_attached, word = bench.cache.attach_storage_backend(store, policy)
    assert is_attached, word


def bench_tree(what: str, benches: Sequence[Bench]) -> Iterator[Figure]:
    inserts: dict[bool, list[float]] = {bench.events: [] for bench in benches}
    matches = []
    for _ in range(ROUNDS + 1):
        key = prompt()
        for bench in benches:  # in turns, so that other load on the machine affects both
            inserts[bench.events].append(bench.insert(key) * 1e6)
            matches.append(bench.match(key) * 1e6)
            bench.empty()
    yield figure(f"{what}: match of {PAGES} pages", "us", matches[len(benches) :])
    for events, spent in inserts.items():
        yield figure(f"{what}: insert of {PAGES} pages, events {'on' if events else 'off'}", "us", spent[1:])


def bench_moves(what: str, bench: Bench) -> Iterator[Figure]:
    has_store = bench.cache.store is not None
    rates: dict[str, list[float]] = {"backed up": [], "loaded back": []}
    rates |= {"archived": [], "prefetched": []} if has_store else {}
    for turn in range(ROUNDS + 1):
        key = prompt()
        bench.insert(key)
        spent = {"backed up": timed(partial(bench.back_up, key))}
        if has_store:
            spent["archived"] = timed(bench.settle)
        bench.demote()
        spent["loaded back"] = timed(partial(bench.load_back, key))
        bench.empty()
        if has_store:
            spent["prefetched"] = timed(partial(bench.prefetch, key))
            bench.empty()
            bench.cache.clear_storage_backend()
        if turn:  # the first one touches fresh memory
            for name, seconds in spent.items():
                rates[name].append(PAGES / seconds)
    for name, values in rates.items():
        yield figure(f"{what}: {name}", "pages/s", values)


def run() -> list[Figure]:
    torch.set_num_threads(1)  # as in `bench_storage`
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, mooncake_store() as settings:
        for name in MODELS:
            for tiers in TIERS:
                figures.extend(bench_combination(name, tiers, partial(open_store, tiers, Path(folder), settings)))
    return figures


def open_store(tiers: str, folder: Path, settings: MooncakeSettings, identity: StorageIdentity) -> HiCacheStorage:
    if tiers == "directory":
        return DirectoryStorage(folder, identity, capacity_bytes=STORE_BYTES)
    return MooncakeStorage.connect(identity, settings)


if __name__ == "__main__":
    main("UnifiedRadixCache", run)
