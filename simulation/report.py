"""The results of a run."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from analysis.curves import Sums, TimeBins
from simulation.settings import Seconds

_SUMS = (  # of `PolicyReport.to_dict`
    "requests", "prompt_tokens", "found_tokens", "found_share", "imbalance", "divergent_pages", "divergent_answers",
)  # fmt: skip


@dataclass(slots=True)
class WorkerLoad:
    """The work of one worker."""

    worker: str
    requests: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    """Tokens of its prompts that were in its cache. The others had to be computed."""
    cut_requests: int = 0
    """Requests longer than the cache, of which only the beginning was cached."""
    divergent_pages: int = 0
    """Pages that either its cache or the router's view held at the end, but not both."""
    divergent_answers: int = 0
    """With group streams: number of the last prompts whose match in its cache differs from the router's score."""

    @property
    def computed_tokens(self) -> int:
        """Tokens of its prompts that were not in cache."""
        return self.prompt_tokens - self.found_tokens


class RunCurves(NamedTuple):
    """What the workers did over time, in milliseconds since the workload began."""

    bins: TimeBins
    """By the arrival of requests."""
    prompt_tokens: Sums
    """[bins, workers]"""
    found_tokens: Sums
    """[bins, workers]"""
    ttft_ms: Sums
    """[bins, workers] sums of the times to the first token."""
    requests: Sums
    """[bins, workers]"""


class Ended(NamedTuple):
    """A request that has ended: its arrival, the time to its first token, and the mean time between its tokens."""

    arrival_s: float
    ttft_s: float
    mean_itl_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    """How long requests took, in simulated time."""

    requests_per_s: float
    """Requests over the time in which they arrived. NaN if all arrived at once."""
    goodput_per_s: float
    """Of these, requests that met both objectives."""
    ttft_p50_s: float
    """Time to the first token."""
    ttft_p99_s: float
    itl_p50_s: float
    """Time between two tokens of a request. All of them count."""
    itl_p99_s: float

    @classmethod
    def of(cls, ended: list[Ended], gaps: list[tuple[Seconds, int]], ttft_slo_s: float, itl_slo_s: float) -> Self:
        """Return the summary. ended: at least one. gaps: times between tokens, and how often each of them occurred."""
        arrivals, ttft, mean_itl = np.array(ended).T
        span_s = float(np.ptp(arrivals))
        span_s = span_s if span_s > 1e-9 else math.nan
        num_good = int(((ttft <= ttft_slo_s) & (mean_itl <= itl_slo_s)).sum())
        times = np.concatenate([np.zeros(0), *(steps for steps, _ in gaps)])
        weights = np.repeat([number for _, number in gaps], [len(steps) for steps, _ in gaps])
        of_ttft = np.quantile(ttft, (0.5, 0.99), method="inverted_cdf")
        of_itl = np.quantile(times, (0.5, 0.99), weights=weights, method="inverted_cdf") if len(times) else np.zeros(2)
        return cls(len(ended) / span_s, num_good / span_s, *of_ttft.tolist(), *of_itl.tolist())


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """One policy, one fleet, one workload. Deterministic except for `seconds`, unless the run was live."""

    policy: str
    workers: tuple[WorkerLoad, ...]
    queries: int
    """Queries of the policy to the index."""
    seconds: float
    """Wall-clock time of the whole run."""
    latency: Latency | None = None
    """None if engines answered without delay."""
    curves: RunCurves | None = field(default=None, compare=False, repr=False)
    """None if it was not observed."""

    @property
    def requests(self) -> int:
        """Requests served."""
        return sum(load.requests for load in self.workers)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(load.prompt_tokens for load in self.workers)

    @property
    def found_tokens(self) -> int:
        """Tokens of all prompts that were in the cache of the worker that got them."""
        return sum(load.found_tokens for load in self.workers)

    @property
    def found_share(self) -> float:
        """`found_tokens / prompt_tokens`; 0 without any."""
        return self.found_tokens / max(1, self.prompt_tokens)

    @property
    def imbalance(self) -> float:
        """Requests of the busiest worker divided by the mean; 1 is even."""
        return max(load.requests for load in self.workers) * len(self.workers) / max(1, self.requests)

    @property
    def divergent_pages(self) -> int:
        """Sum over all workers; 0 means that every view equalled its cache."""
        return sum(load.divergent_pages for load in self.workers)

    @property
    def divergent_answers(self) -> int:
        """Sum over all workers; 0 means that the router knew what every cache would match."""
        return sum(load.divergent_answers for load in self.workers)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the curves as plain values, for JSON."""
        plain = asdict(replace(self, curves=None))
        del plain["curves"]
        return plain | {name: getattr(self, name) for name in _SUMS}
