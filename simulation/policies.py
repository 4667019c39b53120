"""Routing policies, which choose the worker of a request."""

import random
from typing import Protocol

from kv_events.errors import InvalidValueError
from selection import policies
from selection.candidates import Asked
from simulation.router import Router
from simulation.workload import Request


class Policy(Protocol):
    """A policy for one run. It may remember its choices."""

    def choose(self, request: Request, router: Router, request_id: str, now: float) -> int:
        """Return the number of the worker that gets the request. now: in seconds."""


class RandomPolicy:
    """Chooses a worker at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, request: Request, router: Router, request_id: str, now: float) -> int:
        return self._random.randrange(router.num_workers)


class RoundRobinPolicy:
    """Chooses the workers in turns."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, router: Router, request_id: str, now: float) -> int:
        chosen = self._next % router.num_workers
        self._next = chosen + 1
        return chosen


class ServicePolicy:
    """A policy of the service, which books its choices."""

    def __init__(self, names: str) -> None:
        """names: see `selection.policies`. Raises InvalidValueError."""
        self._policy = policies.create_policy(names)

    def choose(self, request: Request, router: Router, request_id: str, now: float) -> int:
        candidates = router.candidates(request, now)
        asked = Asked(len(request.token_ids), request.session, now=now)
        choice = self._policy.choose(asked, candidates)
        return router.reserve(request, candidates, choice, request_id, now)


POLICIES = ("random", "round-robin", policies.DEFAULT_POLICY, "lmetric")
"""Policies that are worth a comparison."""


def create_policy(name: str, seed: int) -> Policy:
    """Return a new policy: random, round-robin, or one of the service. Raises InvalidValueError."""
    if name == "random":
        return RandomPolicy(seed)
    if name == "round-robin":
        return RoundRobinPolicy()
    try:
        return ServicePolicy(name)
    except InvalidValueError as error:
        expected = error.expected.replace("one of", "one of random, round-robin,")
        raise InvalidValueError("policy", error.value, expected) from None
