"""The choice of a worker, given the answer to a query."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import NamedTuple

from msgspec import UNSET

from kv_events.errors import InvalidValueError, check_type, shorten
from kv_events.http.queries import PeerAnswer, PeerInstance

DEFAULT_TIER_WEIGHTS = (1.0, 0.75, 0.5, 0.25)
"""The worth of a token on gpu, cpu, disk and external. A guess: measure the time that each tier saves and use that."""

NO_WORKER = PeerAnswer(scores={}, instances={})
"""The answer if no worker holds anything."""


class WorkerChoice(NamedTuple):
    """The worker that should get a request."""

    worker: str
    dp_rank: int | None
    """The rank whose tokens are worth most. None if the worker holds nothing, or if the answer does not tell which
    rank holds the tokens: then any rank is equally good."""
    tokens: int
    """Tokens of the prompt that the worker or rank holds, on any tier."""
    score: float
    """The score that decided."""


def best_worker(answer: PeerAnswer, load: Mapping[str, float] | None = None) -> WorkerChoice | None:
    """The worker with the highest score, or None if there is no candidate.

    score = tokens held - load. The tokens are those of the worker's best rank: weighted if the query gave tier weights,
    otherwise tokens on any tier.
    load: worker -> tokens of work that wait there, such as prompt tokens still to be computed. Its keys are the only
    candidates, including workers that hold nothing. Without a load, the workers of the answer are the candidates.

    Ties are broken by the smaller load, then the longer match, then the name in sort order, so that equal queries give
    equal choices. Among equally valuable ranks of a worker, the longer match wins, then more tokens on the device, then
    the lowest number.

    Raises InvalidValueError for arguments of other types. For a load that is not a number, the message names its key.
    """
    return next(iter(rank_workers(answer, load)), None)


def rank_workers(answer: PeerAnswer, load: Mapping[str, float] | None = None) -> list[WorkerChoice]:
    """All candidates by the rule of `best_worker`, the best one first. Raises InvalidValueError."""
    check_type("answer", answer, PeerAnswer)
    loads = dict.fromkeys(answer.instances, 0.0) if load is None else load
    check_load(loads)
    choices = [_choice(name, answer.instances.get(name), waiting) for name, waiting in loads.items()]

    def rank(choice: WorkerChoice) -> tuple[float, float, int, str]:
        return (-choice.score, loads[choice.worker], -choice.tokens, choice.worker)

    return sorted(choices, key=rank)


def check_load(load: Mapping[str, float]) -> None:
    """Raises InvalidValueError if `load` does not map names to numbers. Names the key of the wrong value."""
    if not isinstance(load, Mapping):
        raise InvalidValueError("load", load, "a mapping of workers to numbers")
    for worker, waiting in load.items():
        if not isinstance(worker, str):
            raise InvalidValueError("load", worker, "names of workers as keys")
        if not isinstance(waiting, Real) or math.isnan(waiting):
            raise InvalidValueError(f"load[{shorten(worker)}]", waiting, "a number")


def _choice(name: str, held: PeerInstance | None, waiting: float) -> WorkerChoice:
    if held is None:
        return WorkerChoice(name, None, 0, -waiting)
    matched = held.dp if held.matched_dp is UNSET else held.matched_dp
    if held.weighted is UNSET:
        whole, worth = float(held.longest_matched), {rank: float(tokens) for rank, tokens in matched.items()}
    elif len(held.dp) == 1:
        whole, worth = held.weighted, dict.fromkeys(held.dp, held.weighted)
    else:
        whole, worth = held.weighted, held.weighted_dp or {}
    known = worth.keys() & matched.keys()
    if not known or max(matched.values()) < held.longest_matched:
        return WorkerChoice(name, None, held.longest_matched, whole - waiting)
    best = min(known, key=lambda rank: (-worth[rank], -matched[rank], -held.dp.get(rank, 0), rank))
    return WorkerChoice(name, best, matched[best], worth[best] - waiting)
