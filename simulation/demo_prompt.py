"""The prompt of `kvsight demo --prompt`. Simulated engines keep parts of it, whose lengths depend on their seeds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from kv_events.hashing import U32Array
from simulation.requests import Request
from simulation.workload import WorkloadSettings, generate

NUM_TOKENS = 2048
_VOCABULARY = 128_000
_LENGTHS = 4
_REPEAT_EVERY = 50
"""So often that the cache never evicts it."""
_SEED_STEP = 1000


def demo_prompt() -> U32Array:
    """Return the prompt: uint32[NUM_TOKENS], always the same."""
    return np.random.default_rng(0).integers(0, _VOCABULARY, NUM_TOKENS, dtype=np.uint32)


def kept_part(seed: int) -> U32Array:
    """Return the beginning of the prompt that an engine with this seed keeps: all, a half, a quarter or an eighth."""
    return demo_prompt()[: NUM_TOKENS >> seed % _LENGTHS]


def engine_requests(seed: int) -> Iterator[Request]:
    """Yield the requests of a simulated engine, without end. Engines with other seeds, below 1000, get others.

    The first one, and one in 50 from there on, is the engine's part of the demo prompt.
    """
    kept = Request(0.0, kept_part(seed))
    workload = (request for part in count(seed, _SEED_STEP) for request in generate(WorkloadSettings(seed=part)))
    for number, request in enumerate(workload):
        if number % _REPEAT_EVERY == 0:
            yield kept
        yield request
