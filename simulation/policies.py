"""Routing policies, which choose the worker of a request."""

import math
import random
from collections.abc import Callable
from typing import Protocol

from kv_events.errors import InvalidValueError
from simulation.router import Router
from simulation.workload import Request


class Policy(Protocol):
    """A policy for one run. It may remember its choices."""

    def choose(self, request: Request, router: Router) -> int:
        """Return the number of the worker that gets the request."""


class RandomPolicy:
    """Chooses a worker at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, request: Request, router: Router) -> int:
        return self._random.randrange(router.num_workers)


class RoundRobinPolicy:
    """Chooses the workers in turns."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, router: Router) -> int:
        chosen = self._next % router.num_workers
        self._next = chosen + 1
        return chosen


class KvAwarePolicy:
    """Chooses the worker with the least work: tokens of this prompt that it must compute, plus a share of its load.

    Load is the recent work of a worker: tokens to compute and a fixed number for each request, which decay with
    `_WINDOW_S`. If its weight is too low, a popular prefix overloads one worker; if it is too high, prefixes are copied
    to all workers. On the Mooncake conversation trace, a weight of 0.1 finds almost as much as one cache of the fleet's
    total size, with a load within 10% of even; a weight of 1 finds a fifth less.
    """

    _WINDOW_S = 30.0
    _LOAD_WEIGHT = 0.1
    _REQUEST_TOKENS = 1000  # a request keeps a worker busy even if its whole prompt is in cache

    def __init__(self, num_workers: int) -> None:
        self._load = [0.0] * num_workers
        self._load_at_s = 0.0

    def choose(self, request: Request, router: Router) -> int:
        self._fade(request.arrival_s)
        to_compute = [len(request.token_ids) - found for found in router.overlaps(request)]
        costs = [tokens + self._LOAD_WEIGHT * load for tokens, load in zip(to_compute, self._load, strict=True)]
        router.compare([-cost for cost in costs])
        chosen = min(range(len(costs)), key=costs.__getitem__)
        self._load[chosen] += to_compute[chosen] + self._REQUEST_TOKENS
        return chosen

    def _fade(self, now_s: float) -> None:
        factor = math.exp(-max(0.0, now_s - self._load_at_s) / self._WINDOW_S)
        self._load = [load * factor for load in self._load]
        self._load_at_s = now_s


POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "random": lambda num_workers, seed: RandomPolicy(seed),
    "round-robin": lambda num_workers, seed: RoundRobinPolicy(),
    "kv-aware": lambda num_workers, seed: KvAwarePolicy(num_workers),
}
"""Name -> function of the number of workers and a seed that returns a new policy."""


def create_policy(name: str, num_workers: int, seed: int) -> Policy:
    """Return a new policy. Raises InvalidValueError for a name that is not in `POLICIES`."""
    create = POLICIES.get(name)
    if create is None:
        raise InvalidValueError("policy", name, f"one of {', '.join(POLICIES)}")
    return create(num_workers, seed)
