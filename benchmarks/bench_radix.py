"""The cost of a RadixCache to its engine: `python -m benchmarks.bench_radix [--json FILE]`.

Inserts with events on and off are compared with hashing in both cases: "off, hashed" inserts with events off and then
computes the new node's block and sequence hashes, so the ratio is the cost of the events alone. Rounds of all kinds
take turns, so that other load on the machine affects them equally. Queues are drained between inserts, untimed.
"""

import gc
from collections.abc import Callable
from statistics import median

import numpy as np

from benchmarks.report import Figure, figure, main, timed
from engine_cache import EvictParams, InsertParams, MatchPrefixParams, RadixCache, RadixKey
from engine_cache.tree.node import compute_node_hash_values, compute_node_sequence_hashes
from kv_events.hash_seed import SEED

SEED_OF_TOKENS = 7
VOCABULARY = 128_000
PAGE, PROMPT = 16, 4096
TREE_PROMPTS, SHARED, OWN = 3000, 1024, 256
LONG_PAGE, LONG_PROMPT, TURN = 64, 12_032, 752 * 2
ROUNDS, PER_ROUND = 10, 40

rng = np.random.default_rng(SEED_OF_TOKENS)


def tokens(count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count, dtype=np.uint32)


def filled_cache(*, events: bool) -> RadixCache:
    """Return a few thousand prompts that share one system prompt."""
    cache = RadixCache(page_size=PAGE, enable_kv_cache_events=events)
    system_prompt = tokens(SHARED)
    rows = np.arange(SHARED + OWN)
    for _ in range(TREE_PROMPTS):
        cache.insert(InsertParams(RadixKey(np.concatenate((system_prompt, tokens(OWN)))), rows))
        cache.take_events()
    return cache


def insert(cache: RadixCache, key: RadixKey, rows: np.ndarray) -> None:
    cache.insert(InsertParams(key, rows))


def insert_and_hash(cache: RadixCache, key: RadixKey, rows: np.ndarray) -> None:
    cache.insert(InsertParams(key, rows))
    leaf = cache.root_node.children[key.page_key(PAGE)]
    compute_node_hash_values(leaf, PAGE)
    compute_node_sequence_hashes(leaf, PAGE, SEED)


def bench_insert() -> dict[str, list[float]]:
    """Return the microseconds of each insert of a new prompt, by kind."""
    kinds: dict[str, tuple[RadixCache, Callable[[RadixCache, RadixKey, np.ndarray], None]]] = {
        "insert, events off": (filled_cache(events=False), insert),
        "insert, events off, hashed": (filled_cache(events=False), insert_and_hash),
        "insert, events on": (filled_cache(events=True), insert),
    }
    figures: dict[str, list[float]] = {kind: [] for kind in kinds}
    rows = np.arange(PROMPT)
    for _ in range(ROUNDS):
        for kind, (cache, run) in kinds.items():
            for _ in range(PER_ROUND):
                key = RadixKey(tokens(PROMPT))
                figures[kind].append(1e6 * timed(lambda c, k, r: r(c, k, rows), cache, key, run))
                cache.take_events()
    return figures


def bench_cached() -> list[float]:
    """Return the microseconds of match and insert of a long prompt cached in eight nodes, keyed by an array."""
    cache = RadixCache(page_size=LONG_PAGE)
    prompt, rows = tokens(LONG_PROMPT), np.arange(LONG_PROMPT)
    for end in range(TURN, LONG_PROMPT + 1, TURN):
        cache.insert(InsertParams(RadixKey(prompt[:end]), rows[:end]))

    def again() -> None:
        key = RadixKey(prompt)
        match = cache.match_prefix(MatchPrefixParams(key))
        cache.insert(InsertParams(key, match.device_indices))

    return [1e6 * timed(again) for _ in range(ROUNDS * PER_ROUND)]


def bench_evict() -> list[float]:
    """Return the microseconds of evicting one leaf of a few thousand."""
    cache = filled_cache(events=False)
    return [1e6 * timed(lambda: cache.evict(EvictParams(OWN))) for _ in range(PER_ROUND)]


def ratio(name: str, on: list[float], off: list[float]) -> Figure:
    """Return the ratio of the medians."""
    return figure(name, "", [median(on) / median(off)], "<= 1.5")


def run() -> list[Figure]:
    """Return all figures. Inserts are measured again with the garbage collector paused, because its runs vary."""
    kinds = bench_insert()
    gc.freeze()
    gc.disable()
    paused = bench_insert()
    gc.enable()
    gc.unfreeze()
    on, off = "insert, events on", "insert, events off, hashed"
    return [
        *[figure(kind, "us", values) for kind, values in kinds.items()],
        ratio("events on / off, hashing in both", kinds[on], kinds[off]),
        ratio("the same, collector paused", paused[on], paused[off]),
        figure(f"match + insert, {LONG_PROMPT} cached tokens, page {LONG_PAGE}", "us", bench_cached()),
        figure(f"evict one of {TREE_PROMPTS} leaves", "us", bench_evict()),
    ]


if __name__ == "__main__":
    main(f"RadixCache, inserts of {PROMPT} new tokens, page {PAGE}", run)
