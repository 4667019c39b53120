"""What a RadixCache costs its engine: `python benchmarks/bench_radix.py [--json FILE]`.

Inserts with events on and off are compared with hashing in both: "off, hashed" inserts with events off and then
computes the new node's block and sequence hashes, so the ratio is the cost of the events alone. Rounds of all kinds
take turns, so that a busy moment of the machine hits them alike; queues are drained between inserts, not timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import numpy as np
from rich.console import Console
from rich.table import Table

from engine_cache import EvictParams, InsertParams, MatchPrefixParams, RadixCache, RadixKey
from engine_cache.node import compute_node_hash_values, compute_node_sequence_hashes
from kv_events.hashing import SEED

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
    """Some thousand prompts behind one system prompt."""
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
    """Microseconds of each insert of a new prompt, by kind."""
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
                figures[kind].append(timed(lambda c=cache, k=key, r=run: r(c, k, rows)))
                cache.take_events()
    return figures


def bench_cached() -> list[float]:
    """Microseconds of match and insert of a long prompt that is cached in eight nodes, key made from an array."""
    cache = RadixCache(page_size=LONG_PAGE)
    prompt, rows = tokens(LONG_PROMPT), np.arange(LONG_PROMPT)
    for end in range(TURN, LONG_PROMPT + 1, TURN):
        cache.insert(InsertParams(RadixKey(prompt[:end]), rows[:end]))

    def again() -> None:
        key = RadixKey(prompt)
        match = cache.match_prefix(MatchPrefixParams(key))
        cache.insert(InsertParams(key, match.device_indices))

    return [timed(again) for _ in range(ROUNDS * PER_ROUND)]


def bench_evict() -> list[float]:
    """Microseconds of one eviction of one leaf out of some thousand."""
    cache = filled_cache(events=False)
    return [timed(lambda: cache.evict(EvictParams(OWN))) for _ in range(PER_ROUND)]


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def summary(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    return {"median_us": round(median(values), 1), "q1_us": round(low, 1), "q3_us": round(high, 1)}


def measure() -> dict[str, object]:
    figures = {kind: summary(values) for kind, values in bench_insert().items()}
    gc.freeze()
    gc.disable()
    paused = {kind: summary(values) for kind, values in bench_insert().items()}
    gc.enable()
    gc.unfreeze()
    figures["insert, events on, collector paused"] = paused["insert, events on"]
    figures["insert, events off, hashed, collector paused"] = paused["insert, events off, hashed"]
    figures[f"match + insert, {LONG_PROMPT} cached tokens, page {LONG_PAGE}"] = summary(bench_cached())
    figures[f"evict one of {TREE_PROMPTS} leaves"] = summary(bench_evict())
    return {
        "machine": {"cores": os.cpu_count(), "cpu": platform.machine(), "python": platform.python_version()},
        "date": datetime.now(UTC).date().isoformat(),
        "seed": SEED_OF_TOKENS,
        "prompt_tokens": PROMPT,
        "page_size": PAGE,
        "figures": figures,
        "on_to_off_hashed": ratio(figures, ""),
        "on_to_off_hashed_collector_paused": ratio(figures, ", collector paused"),
    }


def ratio(figures: dict[str, dict[str, float]], suffix: str) -> float:
    on, off = figures[f"insert, events on{suffix}"], figures[f"insert, events off, hashed{suffix}"]
    return round(on["median_us"] / off["median_us"], 2)


def show(report: dict[str, object]) -> None:
    table = Table(title=f"RadixCache, microseconds; inserts are of {PROMPT} new tokens, page {PAGE}")
    for column in ("what", "median", "quartiles"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, figure in report["figures"].items():  # type: ignore[attr-defined]
        table.add_row(name, f"{figure['median_us']:.1f}", f"{figure['q1_us']:.1f} .. {figure['q3_us']:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"events on / off, hashing in both: {report['on_to_off_hashed']} "
        f"(collector paused: {report['on_to_off_hashed_collector_paused']})"
    )
    console.print(f"{report['machine']}, {report['date']}, seed {report['seed']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    report = measure()
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
