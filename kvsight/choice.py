"""From an answer to a decision: which worker should get the request?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from api.schemas import PeerAnswer, PeerInstance

DEFAULT_TIER_WEIGHTS = (1.0, 0.75, 0.5, 0.25)
"""What a token of gpu, cpu, disk and external is worth. A guess: the time that each tier saves, measured, is better."""

NOBODY = PeerAnswer(scores={}, instances={})
"""The answer in which no worker holds anything."""


class WorkerChoice(NamedTuple):
    """Where a request should go."""

    worker: str
    dp_rank: int | None
    """The rank that holds most on its device; None: the worker holds nothing of the prompt, any rank will do."""
    tokens: int
    """Of the prompt that it holds, on any tier."""
    score: float
    """What it was chosen by."""


def best_worker(answer: PeerAnswer, load: Mapping[str, float] | None = None) -> WorkerChoice | None:
    """The worker with the highest score, or None where there is no candidate.

    score = tokens held - load. Tokens are `weighted` where the query gave tier weights, else `longest_matched`.
    load: worker -> tokens of work that wait there (prompt tokens still to be computed, say); its keys are the
    candidates, also those that hold nothing, and nobody else is. Without it the candidates are the answer's workers.

    Ties go to the smaller load, then to the longer match, then to the name that sorts first: equal questions get equal
    answers. Among a worker's ranks the one with most tokens on its device wins, then the lowest number.
    """
    loads = dict.fromkeys(answer.instances, 0.0) if load is None else load
    choices = [_choice(name, answer.instances.get(name), waiting) for name, waiting in loads.items()]

    def rank(choice: WorkerChoice) -> tuple[float, float, int, str]:
        return (-choice.score, loads[choice.worker], -choice.tokens, choice.worker)

    return min(choices, key=rank, default=None)


def _choice(name: str, held: PeerInstance | None, waiting: float) -> WorkerChoice:
    if held is None:
        return WorkerChoice(name, None, 0, -waiting)
    worth = held.weighted if isinstance(held.weighted, float) else float(held.longest_matched)
    rank = min(held.dp, key=lambda rank: (-held.dp[rank], rank), default=None)
    return WorkerChoice(name, rank, held.longest_matched, worth - waiting)
