"""From an answer to a decision: which worker should get the request?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import UNSET

from kv_events.errors import InvalidValueError, shorten
from kvsight.schemas.queries import PeerAnswer, PeerInstance

DEFAULT_TIER_WEIGHTS = (1.0, 0.75, 0.5, 0.25)
"""What a token of gpu, cpu, disk and external is worth. A guess: the time that each tier saves, measured, is better."""

NOBODY = PeerAnswer(scores={}, instances={})
"""The answer in which no worker holds anything."""


class WorkerChoice(NamedTuple):
    """Where a request should go."""

    worker: str
    dp_rank: int | None
    """The rank whose tokens are worth most; None: the worker holds nothing, or the answer does not tell which rank
    holds it. Any rank will do then."""
    tokens: int
    """Of the prompt that it holds, on any tier."""
    score: float
    """What it was chosen by."""


def best_worker(answer: PeerAnswer, load: Mapping[str, float] | None = None) -> WorkerChoice | None:
    """The worker with the highest score, or None where there is no candidate.

    score = tokens held - load. Tokens are those of the worker's best rank: by weight where the query gave tier weights,
    on any tier alike where it did not.
    load: worker -> tokens of work that wait there (prompt tokens still to be computed, say); its keys are the
    candidates, also those that hold nothing, and nobody else is. Without it the candidates are the answer's workers.

    Ties go to the smaller load, then to the longer match, then to the name that sorts first: equal questions get equal
    answers. Among a worker's ranks that are worth the same, the longer match wins, then more tokens on the device, then
    the lowest number.

    Raises InvalidValueError for a load that is not a number.
    """
    loads = dict.fromkeys(answer.instances, 0.0) if load is None else load
    check_load(loads)
    choices = [_choice(name, answer.instances.get(name), waiting) for name, waiting in loads.items()]

    def rank(choice: WorkerChoice) -> tuple[float, float, int, str]:
        return (-choice.score, loads[choice.worker], -choice.tokens, choice.worker)

    return min(choices, key=rank, default=None)


def check_load(load: Mapping[str, float]) -> None:
    """Raises InvalidValueError, which names the worker."""
    for worker, waiting in load.items():
        if math.isnan(waiting):
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
