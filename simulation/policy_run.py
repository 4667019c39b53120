"""One policy with its own fleet."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from analysis.curves import Sums, TimeBins
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from kv_events.streams import group_model
from publisher import EventPublisher, PublisherSettings, Sink
from simulation.caches import create_cache, num_ledger_pages
from simulation.policies import create_policy
from simulation.report import PolicyReport, RunCurves, WorkerLoad
from simulation.router import Router
from simulation.settings import SimulationSettings
from simulation.worker import SimulatedWorker, divergent_pages
from simulation.workload import Request

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called at intervals with the policy's name, the number of requests done, and the total."""

_PROGRESS_EVERY = 32
_REQUESTS_TO_CHECK = 64


GroupName: TypeAlias = str | None
"""The group of a worker's stream; None for full KV."""


def create_publishers(
    settings: SimulationSettings, policy: str, create_sink: Callable[[PublisherSettings], Sink]
) -> list[dict[GroupName, EventPublisher]]:
    """Return the publishers of a policy's fleet, by worker. They are not started."""
    model = settings.model_of(policy)
    models = {None: model} | {group: group_model(model, group) for group in settings.event_groups}

    def create(number: int, name: str) -> EventPublisher:
        own = PublisherSettings.ignoring_environment(
            model=name,
            worker=f"worker-{number}",
            block_size=settings.page_size,
            ledger_pages=num_ledger_pages(settings),
        )
        return EventPublisher(own, create_sink(own))

    return [{group: create(number, name) for group, name in models.items()} for number in range(settings.workers)]


class PolicyRun:
    """Serves requests one at a time. The caller carries the workers' events to `namespaces`."""

    def __init__(
        self,
        policy: str,
        settings: SimulationSettings,
        publishers: Sequence[Mapping[GroupName, EventPublisher]],
        namespaces: Namespaces,
        freshness: Freshness,
    ) -> None:
        """publishers: those of each worker. Raises InvalidValueError for an unknown policy."""
        names = [own[None].stream.worker for own in publishers]
        self._name = policy
        self._policy = create_policy(policy, settings.workers, settings.seed)
        self._namespaces = namespaces
        self.router = Router(namespaces, freshness, settings.model_of(policy), names, settings.page_size)
        self._loads = [WorkerLoad(name) for name in names]
        bins = TimeBins()
        self._curves = RunCurves(bins, Sums(bins, len(names)), Sums(bins, len(names)))
        self.workers = [
            SimulatedWorker(own[None], create_cache(settings), {group: own[group] for group in settings.event_groups})
            for own in publishers
        ]
        self._has_groups = settings.groups
        self._last_requests = deque[Request](maxlen=_REQUESTS_TO_CHECK)
        self.found_tokens = 0
        """Tokens of the newest prompt that were in the cache of its worker."""

    def step(self, request: Request) -> int:
        """Route and serve one request. Returns the number of the worker that served it."""
        self._last_requests.append(request)
        chosen = self._policy.choose(request, self.router)
        served = self.workers[chosen].serve(request)
        load = self._loads[chosen]
        load.requests += 1
        load.prompt_tokens += len(request.token_ids)
        load.found_tokens += served.found_tokens
        load.cut_requests += served.is_cut
        place = self._curves.bins.place(int(request.arrival_s * 1000))
        self._curves.prompt_tokens.values[place, chosen] += len(request.token_ids)
        self._curves.found_tokens.values[place, chosen] += served.found_tokens
        self.found_tokens = served.found_tokens
        return chosen

    def show(self, progress: Progress | None, total: int) -> None:
        """Report progress if the interval has passed."""
        done = sum(load.requests for load in self._loads)
        if progress is not None and (done % _PROGRESS_EVERY == 0 or done == total):
            progress(self._name, done, total)

    def report(self, seconds: float) -> PolicyReport:
        """Return the result.

        Compares every view with its cache and, with group streams, the router's answers with the caches' matches.
        """
        for number, (worker, load) in enumerate(zip(self.workers, self._loads, strict=True)):
            divergent = divergent_pages(worker, self._namespaces.view(worker.publisher.stream))
            load.divergent_pages = sum(divergent.values())
            if self._has_groups:
                load.divergent_answers = sum(
                    self.router.reusable(request)[number] != worker.match_length(request)
                    for request in self._last_requests
                )
        return PolicyReport(self._name, tuple(self._loads), self.router.num_queries, seconds, self._curves)
