"""One policy with its own fleet."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

from analysis.curves import Sums, TimeBins
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from kv_events.reservations import PREFILL_COMPLETE, RELEASED, ReservationRecord
from kv_events.streams import group_model
from publisher import EventPublisher, PublisherSettings, Sink
from selection.policies import seed_choices
from simulation.caches import capacity_pages, create_cache
from simulation.report import Latency, PolicyReport, RunCurves, WorkerLoad
from simulation.router import Policy, Router, create_policy
from simulation.settings import SimulationSettings
from simulation.worker import Running, SimulatedWorker, divergent_pages
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
            ledger_pages=sum(capacity_pages(settings).values()),
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
        seed_choices(settings.seed)
        self._name = policy
        self._engine = settings.engine
        self._namespaces = namespaces
        model, page_size = settings.model_of(policy), settings.page_size
        self._routers = [
            (Router(namespaces, freshness, model, names, page_size), create_policy(policy, settings.seed))
            for _ in range(settings.routers)
        ]
        self.router = self._routers[0][0]
        """The one that got the newest request."""
        self._booking_delay_s = settings.booking_delay_s
        self._booked = deque[tuple[float, Router, ReservationRecord]]()
        """What routers have booked, and when the others learn it."""
        self.request_id = "0"
        """Of the newest request."""
        self._due: list[tuple[float, str, str]] = []
        """Heap of what `step` has still to note: (time, request id, step)."""
        self._loads = [WorkerLoad(name) for name in names]
        bins = TimeBins()
        self._curves = RunCurves(bins, *(Sums(bins, len(names)) for _ in range(4)))
        self.workers = [
            SimulatedWorker(own[None], create_cache(settings), {group: own[group] for group in settings.event_groups})
            for own in publishers
        ]
        self._has_groups = settings.groups
        self._last_requests = deque[Request](maxlen=_REQUESTS_TO_CHECK)
        self.found_tokens = 0
        """Tokens of the newest prompt that were in the cache of its worker."""

    def step(self, request: Request) -> int:
        """Route and serve one request without delay. Returns the number of the worker that served it.

        It stays booked for the time that an idle engine would need.
        """
        now = request.arrival_s
        while self._due and self._due[0][0] <= now:
            at, request_id, step = heappop(self._due)
            self.progress(request_id, step, at)
        chosen = self.route(request, now)
        served = self.workers[chosen].serve(request)
        times = self._engine.alone_seconds(len(request.token_ids), served.found_tokens, request.num_output)
        for step, seconds in zip((PREFILL_COMPLETE, RELEASED), times, strict=True):
            heappush(self._due, (now + seconds, self.request_id, step))
        self.note(request, chosen, served, times[0])
        return chosen

    def route(self, request: Request, now: float) -> int:
        """Return the number of the worker that gets a request. now: in seconds."""
        self._last_requests.append(request)
        self.request_id = str(int(self.request_id) + 1)
        self.router, policy = self._router_of(self.request_id)
        self._share_bookings(now)
        chosen = policy(request, self.router, self.request_id, now)
        self._take_bookings(self.router, now)
        return chosen

    def progress(self, request_id: str, step: str, now: float) -> None:
        """Tell the router of a request how far it is. step: see `kv_events.reservations`."""
        router, _ = self._router_of(request_id)
        router.progress(request_id, step, now)
        self._take_bookings(router, now)

    def _take_bookings(self, router: Router, now: float) -> None:
        self._booked.extend((now + self._booking_delay_s, router, record) for record in router.booked)
        router.booked.clear()

    def _share_bookings(self, now: float) -> None:
        while self._booked and self._booked[0][0] <= now:
            _, source, record = self._booked.popleft()
            for router, _ in self._routers:
                if router is not source:
                    router.book.apply(record, now)

    def _router_of(self, request_id: str) -> tuple[Router, Policy]:
        return self._routers[(int(request_id) - 1) % len(self._routers)]

    def note(self, request: Request, chosen: int, served: Running, ttft_s: float) -> None:
        """Count what a worker has found in its cache, and the time to the first token."""
        load = self._loads[chosen]
        load.requests += 1
        load.prompt_tokens += len(request.token_ids)
        load.found_tokens += served.found_tokens
        load.cut_requests += served.is_cut
        place = self._curves.bins.place(int(request.arrival_s * 1000))
        self._curves.prompt_tokens.values[place, chosen] += len(request.token_ids)
        self._curves.found_tokens.values[place, chosen] += served.found_tokens
        self._curves.ttft_ms.values[place, chosen] += int(ttft_s * 1000)
        self._curves.requests.values[place, chosen] += 1
        self.found_tokens = served.found_tokens

    def show(self, progress: Progress | None, total: int) -> None:
        """Report progress if the interval has passed."""
        done = sum(load.requests for load in self._loads)
        if progress is not None and (done % _PROGRESS_EVERY == 0 or done == total):
            progress(self._name, done, total)

    def report(self, seconds: float, latency: Latency | None = None) -> PolicyReport:
        """Return the result. latency: None: engines answered without delay.

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
        num_queries = sum(router.num_queries for router, _ in self._routers)
        return PolicyReport(self._name, tuple(self._loads), num_queries, seconds, latency, self._curves)
