"""The results of a run."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from analysis.curves import Sums, TimeBins

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


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """One policy, one fleet, one workload. Deterministic except for `seconds`, unless the run was live."""

    policy: str
    workers: tuple[WorkerLoad, ...]
    queries: int
    """Queries of the policy to the index."""
    seconds: float
    """Wall-clock time of the whole run."""
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
