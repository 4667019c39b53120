"""Routing policies, which choose the worker of a request."""

import random
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

from kv_events.errors import InvalidValueError
from selection import policies
from selection.candidates import Asked
from simulation.router import Router
from simulation.workload import Request

Policy: TypeAlias = Callable[[Request, Router, str, float], int]
"""Returns the number of the worker that gets a request, given the id of the request and the time in seconds. It may
remember its choices."""

POLICIES = ("random", "round-robin", policies.DEFAULT_POLICY, "lmetric")
"""Policies that are worth a comparison."""


def create_policy(name: str, seed: int) -> Policy:
    """Return a new policy: random, round-robin, or one of the service, which is booked. Raises InvalidValueError."""
    if name == "random":
        numbers = random.Random(seed)
        return lambda _request, router, _id, _now: numbers.randrange(router.num_workers)
    if name == "round-robin":
        turn = count()
        return lambda _request, router, _id, _now: next(turn) % router.num_workers
    try:
        chooser = policies.create_policy(name)
    except InvalidValueError as error:
        expected = error.expected.replace("one of", "one of random, round-robin,")
        raise InvalidValueError("policy", error.value, expected) from None

    def choose(request: Request, router: Router, request_id: str, now: float) -> int:
        candidates = router.candidates(request, now)
        choice = chooser.choose(Asked(len(request.token_ids), request.session, now=now), candidates)
        return router.reserve(request, candidates, choice, request_id, now)

    return choose
