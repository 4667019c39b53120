"""The cost of caches with several tiers or states: `python -m benchmarks.bench_tiers [--json FILE]`.

Requests: one simulated worker for each kind of cache serves the same conversations with events on and off. With a disk,
pages are hashed in both cases; otherwise only "on" includes the hashing. Round trips: a prompt is inserted, backed up,
acknowledged, evicted and loaded back, with copies that move nothing, so that only the tree is measured. Copies: real
tensors, one node of 64 pages after another, through the controller and its threads. Tree size: match of a cached prompt
and insert of a new one, with up to a million pages; then the same with both tiers full, so that each insert evicts.
"nodes" counts the nodes on the path of a match or an insert and the nodes that an eviction compared.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np
import torch

from benchmarks.report import Figure, figure, main, timed
from engine_cache import (
    BytelessHostPool,
    EvictParams,
    HiCacheController,
    HiRadixCache,
    InitLoadBackParams,
    InsertParams,
    ManualCopyEngine,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    PoolEntry,
    RadixKey,
    ThreadCopyEngine,
)
from engine_cache.pools.device import MHATokenToKVPool, PoolShape
from engine_cache.pools.host import MHATokenToKVPoolHost
from engine_cache.storage.base import PoolName
from engine_cache.tree.eviction import EVICTION_POLICIES, SortKey
from engine_cache.tree.node import TreeNode
from kv_events.schema import EngineEvent
from publisher import EventPublisher
from simulation import CACHES, SimulatedWorker, SimulationSettings, WorkloadSettings, create_cache, generate

SEED = 7
VOCABULARY = 128_000
PAGE, PROMPT = 16, 4096
ROUNDS = 200
REQUESTS = 200
LAYERS, HEADS, HEAD_DIM = 8, 8, 128
NODE_PAGES, COPY_NODES = 64, 8
TREE_PAGES = (1_000, 10_000, 100_000, 1_000_000)
SHARED_PAGES, OWN_PAGES, PROMPTS_PER_SYSTEM_PROMPT = 32, 32, 50

rng = np.random.default_rng(SEED)


def tokens(count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count, dtype=np.uint32)


class CountingCache(HiRadixCache):
    """Counts the nodes that it visits."""

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PagedTokenToKVPoolAllocator,
        controller: HiCacheController,
        enable_kv_cache_events: bool,
    ) -> None:
        self.looked_at = 0
        lru = EVICTION_POLICIES["lru"]

        def counted(node: TreeNode) -> SortKey:
            self.looked_at += 1
            return lru.key(node)

        EVICTION_POLICIES["counted"] = lru._replace(key=counted)
        super().__init__(
            page_size=page_size,
            allocator=allocator,
            controller=controller,
            enable_kv_cache_events=enable_kv_cache_events,
            eviction_policy="counted",
        )
        self._descend = self.tree.descend
        self.tree.descend = self._counted_descend  # type: ignore[method-assign]

    def _counted_descend(
        self, key: RadixKey, visit: Callable[[TreeNode], None] | None = None
    ) -> tuple[list[TreeNode], int]:
        path, done = self._descend(key, visit)
        self.looked_at += len(path)
        return path, done


def byteless_cache(
    device_pages: int, host_pages: int, *, events: bool = False, kind: type[HiRadixCache] = HiRadixCache
) -> HiRadixCache:
    """Return a cache whose copies finish as soon as a caller waits for them."""
    pool = PagedTokenToKVPoolAllocator(device_pages * PAGE, PAGE)
    entry = PoolEntry(PoolName.KV, BytelessHostPool(host_pages * PAGE, PAGE), None, pool)
    controller = HiCacheController(entry, ManualCopyEngine())
    return kind(page_size=PAGE, allocator=pool, controller=controller, enable_kv_cache_events=events)


def round_trip(cache: HiRadixCache, key: RadixKey) -> None:
    """Insert a prompt, back it up, evict it from the device and load it back."""
    assert cache.allocator is not None
    rows = cache.allocator.alloc(len(key))
    assert rows is not None
    cache.insert(InsertParams(key, rows))
    cache.writing_check(write_back=True)
    cache.evict(EvictParams(len(key)))
    match = cache.match_prefix(MatchPrefixParams(key))
    cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
    cache.ready_to_load_host_cache()
    assert cache.cache_controller is not None
    cache.cache_controller.engine.drain()
    cache.loading_check()


def bench_events() -> Iterator[Figure]:
    spent: dict[bool, list[float]] = {False: [], True: []}
    num_pages = 2 * PROMPT // PAGE
    caches = {events: byteless_cache(num_pages, num_pages + 1, events=events) for events in spent}
    for _ in range(ROUNDS):
        for events, cache in caches.items():  # in turns, so that other load on the machine affects both
            key = RadixKey(tokens(PROMPT))
            spent[events].append(timed(lambda c, k: round_trip(c, k), cache, key) * 1e6)
            cache.take_events()
            cache.evict(EvictParams(PROMPT))
            cache.evict_host(PROMPT)
            cache.take_events()
    for events, values in spent.items():
        yield figure(f"round trip of {PROMPT} tokens, events {'on' if events else 'off'}", "us", values)


class NoPublisher:
    """A publisher that discards a worker's events."""

    def publish(self, events: list[EngineEvent]) -> None:
        """Do nothing."""


def bench_requests(kind: str) -> Iterator[Figure]:
    """Return the milliseconds of each request of a few conversations."""
    settings = SimulationSettings(workers=1, cache=kind, capacity_tokens=2**16, page_size=PAGE)
    requests = generate(WorkloadSettings(num_requests=REQUESTS))
    spent: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        for events in spent:
            made = create_cache(settings)
            made.cache.take_events()
            made.cache.enable_kv_cache_events = events
            worker = SimulatedWorker(cast(EventPublisher, NoPublisher()), made)
            spent[events].append(timed(lambda w: [w.serve(r) for r in requests], worker) * 1e3 / REQUESTS)
    for events, values in spent.items():
        yield figure(f"{kind}: a request, events {'on' if events else 'off'}", "ms", values)


class Copies(NamedTuple):
    """Return a controller with real pools, and the device rows of a few nodes."""

    controller: HiCacheController
    nodes: list[np.ndarray]


def real_copies(layout: str) -> Copies:
    num_pages = NODE_PAGES * COPY_NODES
    device = MHATokenToKVPool(PoolShape(2 * num_pages * PAGE, PAGE, LAYERS, torch.bfloat16), HEADS, HEAD_DIM)
    host = MHATokenToKVPoolHost(device, layout=layout, ratio=1.01)
    pool = PagedTokenToKVPoolAllocator(2 * num_pages * PAGE, PAGE)
    controller = HiCacheController(PoolEntry(PoolName.KV, host, device, pool), ThreadCopyEngine())
    rows = [pool.alloc(NODE_PAGES * PAGE) for _ in range(COPY_NODES)]
    return Copies(controller, [each for each in rows if each is not None])


def bench_copies(layout: str) -> Iterator[Figure]:
    controller, nodes = real_copies(layout)
    to_host, to_device = [], []
    for turn in range(6):
        held: list[np.ndarray] = []

        def write(held: list[np.ndarray] = held) -> None:
            held.extend(rows for node in nodes if (rows := controller.write(node, 0)) is not None)
            controller.finished_writes(wait=True)

        loaded: list[np.ndarray] = []

        def load(held: list[np.ndarray] = held, loaded: list[np.ndarray] = loaded) -> None:
            loaded.extend(rows for node in held if (rows := controller.load(node, 0)) is not None)
            controller.wait_for_layer(controller.start_loading(), LAYERS - 1)

        spent = timed(write), timed(load)
        if turn:  # the first one touches fresh memory
            to_host.append(NODE_PAGES * COPY_NODES / spent[0])
            to_device.append(NODE_PAGES * COPY_NODES / spent[1])
        for host_rows, device_rows in zip(held, loaded, strict=True):
            controller.kv.host_pool.free(host_rows)
            controller.kv.device_allocator.free(device_rows)
    controller.engine.close()
    page_kib = PAGE * LAYERS * HEADS * HEAD_DIM * 2 * 2 // 1024
    yield figure(f"to the host, {layout}, {page_kib} KiB a page", "pages/s", to_host)
    yield figure(f"to the device, {layout}", "pages/s", to_device)


def grow(cache: HiRadixCache, num_pages: int) -> list[np.ndarray]:
    """Insert this number of pages. Returns the prompts."""
    system, prompts, held = tokens(0), [], 0
    for number in range(num_pages):
        if held >= num_pages:
            break
        if number % PROMPTS_PER_SYSTEM_PROMPT == 0:
            system = tokens(SHARED_PAGES * PAGE)
            held += SHARED_PAGES
        prompt = np.concatenate((system, tokens(OWN_PAGES * PAGE)))
        make_room(cache, prompt)
        insert(cache, prompt)
        held += OWN_PAGES
        prompts.append(prompt)
        cache.writing_check(write_back=True)
    return prompts


def make_room(cache: HiRadixCache, prompt: np.ndarray) -> None:
    assert cache.allocator is not None
    cache.evict(EvictParams(max(0, len(prompt) - cache.allocator.available_size())))


def insert(cache: HiRadixCache, prompt: np.ndarray) -> None:
    assert cache.allocator is not None
    rows = cache.allocator.alloc(len(prompt))
    assert rows is not None
    cache.allocator.free(rows[: cache.insert(InsertParams(RadixKey(prompt), rows)).prefix_len])


def bench_size(num_pages: int) -> Iterator[Figure]:
    spare = 2 * ROUNDS * (SHARED_PAGES + OWN_PAGES)
    cache = byteless_cache(num_pages + spare, num_pages + spare + 1)
    prompts = grow(cache, num_pages)
    matches, inserts = [], []
    for turn in range(ROUNDS):
        old = prompts[turn * len(prompts) // ROUNDS]
        new = np.concatenate((old[: SHARED_PAGES * PAGE], tokens(OWN_PAGES * PAGE)))
        matches.append(timed(lambda p: cache.match_prefix(MatchPrefixParams(RadixKey(p))), old) * 1e6)
        inserts.append(timed(lambda p: insert(cache, p), new) * 1e6)
        cache.writing_check(write_back=True)
    yield figure(f"match of {SHARED_PAGES + OWN_PAGES} pages, {num_pages:,} pages in the tree", "us", matches)
    yield figure(f"insert of {OWN_PAGES} new pages, {num_pages:,} pages in the tree", "us", inserts)


def bench_full(num_pages: int) -> Iterator[Figure]:
    """Measure operations on a cache with this number of pages: all of them fill the host, half of them the device."""
    cache = byteless_cache(num_pages // 2, num_pages, kind=CountingCache)
    assert isinstance(cache, CountingCache)
    prompts = grow(cache, 2 * num_pages)[-num_pages // OWN_PAGES // 2 :]
    match, evict = f"match of {SHARED_PAGES + OWN_PAGES} pages", f"evict {OWN_PAGES} pages"
    put = f"insert of {OWN_PAGES} new pages"
    spent: dict[str, list[float]] = {match: [], evict: [], put: []}
    nodes = dict.fromkeys(spent, 0)

    def measure(what: str, run: Callable[..., object], *arguments: object) -> None:
        before = cache.looked_at
        spent[what].append(timed(run, *arguments) * 1e6)
        nodes[what] += cache.looked_at - before

    for turn in range(ROUNDS):
        old = prompts[turn * len(prompts) // ROUNDS]
        new = np.concatenate((old[: SHARED_PAGES * PAGE], tokens(OWN_PAGES * PAGE)))
        measure(match, lambda p: cache.match_prefix(MatchPrefixParams(RadixKey(p))), old)
        measure(evict, make_room, cache, new)
        measure(put, insert, cache, new)
        cache.writing_check(write_back=True)
    for what, values in spent.items():
        yield figure(f"{what}, both tiers full, {num_pages:,} pages", "us", values, nodes=nodes[what] / ROUNDS)


def run() -> list[Figure]:
    figures = [each for kind in CACHES for each in bench_requests(kind)]
    figures += [*bench_events(), *bench_copies("layer_first"), *bench_copies("page_first_direct")]
    for num_pages in TREE_PAGES:
        figures.extend(bench_size(num_pages))
    for num_pages in TREE_PAGES:
        figures.extend(bench_full(num_pages))
    return figures


if __name__ == "__main__":
    main("caches with tiers", run)
