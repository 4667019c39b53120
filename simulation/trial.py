"""One policy with a fleet of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from publisher import EventPublisher, PublisherSettings
from simulation.caches import create_cache, num_ledger_pages
from simulation.divergence import divergent_pages
from simulation.policies import create_policy
from simulation.report import PolicyReport, WorkerLoad
from simulation.requests import Request
from simulation.router import Router
from simulation.settings import SimulationSettings
from simulation.worker import SimulatedWorker

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called now and then with a policy's name, requests done, and requests in all."""

_PROGRESS_EVERY = 32


def publisher_settings(settings: SimulationSettings, policy: str) -> list[PublisherSettings]:
    """Those of a policy's fleet, one a worker."""
    return [
        PublisherSettings.ignoring_environment(
            model=settings.model_of(policy),
            worker=f"worker-{number}",
            block_size=settings.page_size,
            ledger_pages=num_ledger_pages(settings),
        )
        for number in range(settings.workers)
    ]


class Trial:
    """Takes requests one at a time; how the workers' events reach `namespaces` is the caller's business."""

    def __init__(
        self,
        policy: str,
        settings: SimulationSettings,
        publishers: Sequence[EventPublisher],
        namespaces: Namespaces,
        freshness: Freshness,
    ) -> None:
        """Raises InvalidValueError for an unknown policy."""
        names = [publisher.stream.worker for publisher in publishers]
        self._name = policy
        self._policy = create_policy(policy, settings.workers, settings.seed)
        self._namespaces = namespaces
        self.router = Router(namespaces, freshness, settings.model_of(policy), names)
        self._loads = [WorkerLoad(name) for name in names]
        self.workers = [SimulatedWorker(each, create_cache(settings)) for each in publishers]

    def step(self, request: Request) -> int:
        """Route and serve one request. Returns the number of the worker that served it."""
        chosen = self._policy.choose(request, self.router)
        served = self.workers[chosen].serve(request)
        load = self._loads[chosen]
        load.requests += 1
        load.prompt_tokens += len(request.token_ids)
        load.found_tokens += served.found_tokens
        load.cut_requests += served.is_cut
        return chosen

    def show(self, progress: Progress | None, total: int) -> None:
        """Report progress if it is time to."""
        done = sum(load.requests for load in self._loads)
        if progress is not None and (done % _PROGRESS_EVERY == 0 or done == total):
            progress(self._name, done, total)

    def report(self, seconds: float) -> PolicyReport:
        """The result; compares every view with its cache."""
        for worker, load in zip(self.workers, self._loads, strict=True):
            divergent = divergent_pages(worker, self._namespaces.view(worker.publisher.stream))
            load.divergent_pages = sum(divergent.values())
        return PolicyReport(self._name, tuple(self._loads), self.router.num_queries, seconds)
