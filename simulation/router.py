"""The information of a policy: the answers of the index, without access to the caches."""

from collections.abc import Sequence
from functools import partial

from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.scores import WorkerScore, score_all
from kv_events.decisions import VERSION, Candidate, Decision
from kv_events.hashing import namespace_seed, sequence_hashes
from kv_events.limits import MAX_CANDIDATES, MAX_PAGES_PER_DECISION
from kv_events.streams import DEFAULT_TENANT
from simulation.workload import Request


class Router:
    """Queries the index for a policy and counts the queries."""

    def __init__(
        self, namespaces: Namespaces, freshness: Freshness, model: str, workers: Sequence[str], page_size: int
    ) -> None:
        self._namespaces = namespaces
        self._freshness = freshness
        self._model = model
        self._number_of_worker = {worker: number for number, worker in enumerate(workers)}
        self._page_size = page_size
        self._seen: list[int] | None = None
        self._scores_seen: Sequence[float] = ()
        self.num_queries = 0

    @property
    def num_workers(self) -> int:
        """Number of workers that a policy can choose from, numbered from 0."""
        return len(self._number_of_worker)

    def overlaps(self, request: Request) -> list[int]:
        """Return the tokens of the prompt that each worker can reuse, by worker number."""
        self.num_queries += 1
        self._seen = self.reusable(request)
        return self._seen

    def compare(self, scores: Sequence[float]) -> None:
        """Note the numbers by which a policy compares the workers, the highest one wins, for the decision."""
        self._scores_seen = scores

    def decision(self, request: Request, chosen: int, request_id: str, timestamp: float) -> Decision:
        """Return what was chosen since the last call, in the form in which routers report it."""
        seen, self._seen = self._seen, None
        scores, self._scores_seen = self._scores_seen, ()
        workers = list(self._number_of_worker)
        rows = zip(workers, seen or (), scores or [0.0] * len(workers), strict=False)
        hashes = sequence_hashes(request.token_ids, self._page_size, namespace_seed(cache_salt=request.extra_key))
        return Decision(
            VERSION,
            request_id,
            timestamp,
            self._model,
            DEFAULT_TENANT,
            self._page_size,
            len(request.token_ids),
            hashes[:MAX_PAGES_PER_DECISION].astype("<u8", copy=False).tobytes(),
            workers[chosen],
            0,
            None if seen is None else seen[chosen],
            [Candidate(worker, 0, tokens, score) for worker, tokens, score in rows][:MAX_CANDIDATES],
        )

    def reusable(self, request: Request) -> list[int]:
        """Return the same without counting a query, for checks."""
        found = [0] * self.num_workers
        for held in self._scores(request):
            number = self._number_of_worker.get(held.worker)
            if number is not None:
                found[number] = held.longest_matched
        return found

    def num_tiers(self, request: Request) -> int:
        """Return the largest number of tiers that hold one worker's part of the prompt. Not counted as a query."""
        return max((len({*held.tiers} - {0}) for held in self._scores(request)), default=0)

    def _scores(self, request: Request) -> list[WorkerScore]:
        seed = namespace_seed(cache_salt=request.extra_key)
        namespaces = self._namespaces.find(self._model, DEFAULT_TENANT)
        return score_all(namespaces, partial(sequence_hashes, request.token_ids, seed=seed), self._freshness)
