"""Routing policies, which choose the worker of a request, and their information.

That is what the index answers and what is booked. They have no access to the caches.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TypeAlias

import msgspec
import numpy as np

from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.scores import WorkerScore, reusable, score_all
from kv_events.decisions import VERSION, Candidate, Decision
from kv_events.errors import InvalidValueError
from kv_events.hashing import U64Array, namespace_seed, sequence_hashes
from kv_events.limits import MAX_CANDIDATES, MAX_PAGES_PER_DECISION
from kv_events.reservations import Progressed, ReservationRecord, Reserved
from kv_events.streams import DEFAULT_TENANT
from selection import policies
from selection.book import Book
from selection.candidates import Asked, Candidates, Choice
from selection.roster import Found, Rosters
from selection.settings import SelectionSettings
from simulation.workload import Request


class Router:
    """Queries the index for a policy and counts the queries."""

    def __init__(
        self, namespaces: Namespaces, freshness: Freshness, model: str, workers: Sequence[str], page_size: int
    ) -> None:
        predict_s = SelectionSettings.ignoring_environment().predict_s
        self.book = Book(math.inf, predict_s)  # nothing expires, because every request ends
        self._rosters = Rosters(self.book)
        self.booked: list[ReservationRecord] = []
        """What it has booked itself, until the caller takes it away."""
        self._namespaces = namespaces
        self._freshness = freshness
        self._model = model
        self._number_of_worker = {worker: number for number, worker in enumerate(workers)}
        self._page_size = page_size
        self._compared: Sequence[tuple[int, float]] = ()
        self.num_queries = 0

    @property
    def num_workers(self) -> int:
        """Number of workers that a policy can choose from, numbered from 0."""
        return len(self._number_of_worker)

    def candidates(self, request: Request, now: float) -> Candidates:
        """Return the workers as a policy of the service sees them, valid until the next call."""
        self.num_queries += 1
        hashes = self._hashes(request)
        (namespace,) = self._namespaces.find(self._model, DEFAULT_TENANT)
        matches = namespace.index.find(hashes)
        if namespace.groups:
            matches = reusable(namespace, hashes, matches, self._freshness, None).matches
        found = Found(hashes, len(request.token_ids), matches.streams, matches.pages)
        return self._rosters.candidates(namespace, self._freshness, found, now).candidates

    def reserve(self, request: Request, candidates: Candidates, choice: Choice, request_id: str, now: float) -> int:
        """Book a choice. Returns the number of the worker."""
        numbers = [self._number_of_worker[worker] for worker in candidates.workers]
        seen, scores = np.zeros(self.num_workers, np.int64), np.full(self.num_workers, -choice.costs.max())
        seen[numbers], scores[numbers] = candidates.held[:, -1], -choice.costs
        self.compare(scores.tolist(), seen.tolist())
        chosen, computed = numbers[choice.row], round(candidates.computed.item(choice.row))
        decision = self._bare_decision(request, chosen, request_id, now)
        self._book_own(Reserved(VERSION, "", decision, computed, request.session), now)
        return chosen

    def progress(self, request_id: str, step: str, now: float) -> None:
        """Note how far a booked request is. step: see `kv_events.reservations`."""
        self._book_own(Progressed(VERSION, "", request_id, now, step), now)

    def _book_own(self, record: ReservationRecord, now: float) -> None:
        if self.book.apply(record, now):
            self.booked.append(record)

    def compare(self, scores: Sequence[float], seen: Sequence[int] | None) -> None:
        """Note for the decision, by worker number, how a policy compares the workers, and what it has seen.

        scores: the highest one wins. seen: tokens of the prompt; None: it has not asked.
        """
        self._compared = () if seen is None else list(zip(seen, scores, strict=True))

    def decision(self, request: Request, chosen: int, request_id: str, timestamp: float) -> Decision:
        """Return what was chosen since the last call, in the form in which routers report it."""
        compared, self._compared = self._compared, ()
        rows = zip(self._number_of_worker, compared, strict=False)
        candidates = tuple(Candidate(worker, 0, *seen_and_score) for worker, seen_and_score in rows)
        predicted = compared[chosen][0] if compared else None
        bare = self._bare_decision(request, chosen, request_id, timestamp)
        return msgspec.structs.replace(bare, predicted_tokens=predicted, candidates=candidates[:MAX_CANDIDATES])

    def _bare_decision(self, request: Request, chosen: int, request_id: str, timestamp: float) -> Decision:
        return Decision(
            VERSION,
            request_id,
            timestamp,
            self._model,
            DEFAULT_TENANT,
            self._page_size,
            len(request.token_ids),
            self._hashes(request)[:MAX_PAGES_PER_DECISION].astype("<u8", copy=False).tobytes(),
            list(self._number_of_worker)[chosen],
            0,
            None,
            (),
        )

    def _hashes(self, request: Request) -> U64Array:
        return sequence_hashes(request.token_ids, self._page_size, namespace_seed(cache_salt=request.extra_key))

    def reusable(self, request: Request) -> list[int]:
        """Return the tokens of the prompt that each worker can reuse, by worker number. Not counted as a query."""
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


Policy: TypeAlias = Callable[[Request, Router, str, float], int]
"""Returns the number of the worker that gets a request, given the id of the request and the time in seconds. It may
remember its choices."""

POLICIES = ("random", "round-robin", policies.DEFAULT_POLICY, "lmetric")
"""Policies that are worth a comparison."""


def create_policy(name: str, seed: int) -> Policy:
    """Return a new policy: random, round-robin, or one of the service, which is booked. Raises InvalidValueError."""
    if name == "random":
        numbers = random.Random(seed)
        return lambda _request, router, _id, _now: numbers.randrange(router.num_workers)
    if name == "round-robin":
        turn = count()
        return lambda _request, router, _id, _now: next(turn) % router.num_workers
    try:
        chooser = policies.create_policy(name)
    except InvalidValueError as error:
        expected = error.expected.replace("one of", "one of random, round-robin,")
        raise InvalidValueError("policy", error.value, expected) from None

    def choose(request: Request, router: Router, request_id: str, now: float) -> int:
        candidates = router.candidates(request, now)
        choice = chooser.choose(Asked(len(request.token_ids), request.session, now=now), candidates)
        return router.reserve(request, candidates, choice, request_id, now)

    return choose
