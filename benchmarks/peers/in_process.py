"""In process: kvsight's index and hashing, and Dynamo's own binding, `RadixTree` and `compute_block_hash_for_seq`, each
called from Python.

Dynamo's function accepts lists. It returns the hashes of single pages, `sequence_hashes` those that are looked up.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.services import dynamo_folder
from benchmarks.report import Figure, figure, timed
from indexer.index import OverlapIndex
from kv_events.codec import StoredPages
from kv_events.hashing import sequence_hashes

WORKERS, PROMPTS, PAGES = 64, 4, 8192
LENGTHS = (8, 64, 1000, 8192)
HASHED, PAGE_TOKENS = (8, 64, 1000), 16
ROUNDS, CALLS = 9, 100
_SEED = 1
_BATCH = 64

Asked = list[npt.NDArray[np.uint64]]


def run() -> Iterator[Figure]:
    """Yield all figures, ratios first. Both hold the same prompts, and take turns."""
    folder = dynamo_folder()
    if folder is None:
        return
    prompts = _prompts()
    index = _index(prompts)
    with _peer(str(folder)) as ask_peer:
        for length in LENGTHS:
            asked = [prompts[number % PROMPTS][:length] for number in range(CALLS)]
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(ROUNDS):
                ours.append(_median_us(index.find, asked))
                theirs.append(ask_peer(length))
            yield from _compared(f"in process, {WORKERS} workers, {length} pages", ours, theirs)
        for length in HASHED:
            yield from _hashing(length, lambda num_pages: ask_peer(-num_pages))


def _compared(row: str, ours: list[float], theirs: list[float]) -> Iterator[Figure]:
    yield figure(f"{row}: Dynamo : kvsight", "x", [median(theirs) / median(ours)])
    yield figure(f"{row}: kvsight", "us", ours)
    yield figure(f"{row}: Dynamo", "us", theirs)


def _hashing(length: int, ask_peer: Callable[[int], float]) -> Iterator[Figure]:
    tokens = _tokens(length)
    lists = [each.tolist() for each in tokens]
    rounds = [
        (_median_us(_hashes, tokens), _median_us(_hashes, lists), ask_peer(length)) for _ in range(ROUNDS)
    ]  # alternating
    of_arrays, of_lists, theirs = map(list, zip(*rounds, strict=True))
    yield from _compared(f"hash {length} pages, an array for kvsight", of_arrays, theirs)
    yield from _compared(f"hash {length} pages, a list for both", of_lists, theirs)


def _hashes(tokens: Any) -> object:
    return sequence_hashes(tokens, PAGE_TOKENS)


def _tokens(length: int) -> list[npt.NDArray[np.uint32]]:
    random = np.random.default_rng(_SEED)
    return list(random.integers(0, 128_000, (CALLS, length * PAGE_TOKENS), dtype=np.uint32))


def _prompts() -> Asked:
    random = np.random.default_rng(_SEED)
    return list(random.integers(1, 2**63, (PROMPTS, PAGES), dtype=np.uint64))


def _median_us(find: Callable[[Any], object], asked: list[Any]) -> float:
    return median(timed(find, hashes) for hashes in asked) * 1e6


def _index(prompts: Asked) -> OverlapIndex:
    """Return an index in which each worker holds each prompt."""
    index = OverlapIndex()
    starts = np.packbits([1] + [0] * (_BATCH - 1), bitorder="little")
    for _ in range(WORKERS):
        stream = index.add_stream()
        for pages in prompts:
            for at in range(0, PAGES, _BATCH):
                hashes = pages[at : at + _BATCH]
                parent = pages[at - 1 : at] if at else np.zeros(1, np.uint64)
                index.store(stream, StoredPages(0, hashes, hashes, starts, np.ascontiguousarray(parent)), 0, _BATCH)
    return index


@contextmanager
def _peer(folder: str) -> Iterator[Callable[[int], float]]:
    """Run a process with Dynamo's tree for the duration of the block, which gets a function: pages -> median us.

    Negative pages are hashed instead of looked up.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_peer, args=(theirs, folder), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process ends the wait for it

    def ask(length: int) -> float:
        ours.send(length)
        answer: float = ours.recv()
        return answer

    try:
        yield ask
    finally:
        process.kill()
        process.join()


def _serve_peer(pipe: Connection, folder: str) -> None:
    sys.path.insert(0, folder)
    core = import_module("dynamo._core")  # only in this process: it is in an environment of its own
    tree = core.RadixTree()
    prompts = [pages.tolist() for pages in _prompts()]
    for worker in range(WORKERS):
        for number, pages in enumerate(prompts):
            blocks = [{"block_hash": page, "tokens_hash": page} for page in pages]
            event = {"event_id": number, "dp_rank": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
            tree.apply_event(worker, json.dumps(event).encode())
    while True:
        length = pipe.recv()
        if length < 0:
            asked = [each.tolist() for each in _tokens(-length)]
            pipe.send(_median_us(lambda tokens: core.compute_block_hash_for_seq(tokens, PAGE_TOKENS), asked))
            continue
        found = tree.find_matches(prompts[0][:length]).scores
        assert set(found.values()) == {length}, "the tree does not hold the prompts"
        pipe.send(_median_us(tree.find_matches, [prompts[number % PROMPTS][:length] for number in range(CALLS)]))
