"""What a policy sees: the workers that could get a request, as columns of equal length, and what it returns."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


class Candidates(NamedTuple):
    """One row for each DP rank that could get the request. A policy must not change the arrays.

    Tokens of tiers are cumulative, as in answers to queries: gpu <= cpu <= disk <= external.
    """

    workers: Sequence[str]
    """[n]"""
    dp_ranks: Sequence[int]
    """[n]"""
    held: Tokens
    """[n, 4] tokens of the prompt's longest prefix that the rank holds on a tier (gpu, cpu, disk, external) or a faster
    one."""
    predicted: Tokens
    """[n] tokens of the prompt that the rank holds on its device, or is about to: those of earlier decisions count for
    a short time. At least `held[:, 0]`."""
    computed: npt.NDArray[np.float64]
    """[n] tokens of the prompt that the rank must compute: those on its host count 0.25, and those on disks 0.75."""
    prefill_tokens: Tokens
    """[n] prompt tokens of booked requests that the rank still has to compute."""
    decode_blocks: Tokens
    """[n] distinct pages of booked requests, with those of this prompt."""
    requests: Tokens
    """[n] booked requests."""
    pages: Tokens
    """[n] pages that the rank holds on its device, of any prompt."""
    roles: Sequence[str]
    """[n] `prefill`, `decode`, or "" for both."""
    block_size: int
    """Tokens of a page."""


class Asked(NamedTuple):
    """A request to be placed."""

    prompt_tokens: int
    session: str = ""
    """Key of the conversation. Empty: none."""
    priority: float = 0.0
    """More than 0 for urgent requests, less than 0 for those that can wait."""
    options: Mapping[str, float] = {}
    """Parameters of the policy for this request."""
    now: float = 0.0
    """Seconds since 1970."""


class Choice(NamedTuple):
    """What a policy chose."""

    row: int
    """The chosen candidate."""
    costs: npt.NDArray[np.float64]
    """[n] the number by which the policy compared the candidates. The lowest one wins."""
    reason: str
    """Why, in one sentence."""
    prefill: int | None = None
    """The candidate that computes the prompt first, if that is another one."""


class Policy(Protocol):
    """A rule that chooses. One thread calls it. It may remember its choices.

    Packages offer policies with entry points of the group `kvsight.policies`: functions without required parameters
    that return a policy.
    """

    def choose(self, asked: Asked, candidates: Candidates) -> Choice:
        """Return the choice among at least one candidate."""


def selected(candidates: Candidates, rows: list[int]) -> Candidates:
    """Return some of the candidates."""
    columns: tuple[Any, ...] = candidates[:-1]
    taken = (each[rows] if isinstance(each, np.ndarray) else [each[row] for row in rows] for each in columns)
    return Candidates._make((*taken, candidates.block_size))
