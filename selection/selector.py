"""Chooses the worker of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from kv_events.decisions import VERSION, Candidate, Decision
from kv_events.errors import KvsightError
from kv_events.hashing import U64Array
from kv_events.http.selection import SelectRequest
from kv_events.limits import MAX_PAGES_PER_DECISION
from kv_events.reservations import Reserved
from selection.candidates import Asked, Candidates, Choice, Policy, Tokens
from selection.kernels.booked import Bookings
from selection.policies import LeastWork, preferred
from selection.roster import Found, Roster, Rosters, Weighed

_MAX_CANDIDATES, _MAX_POLICIES = 16, 4096


class NoCandidateError(KvsightError):
    """No worker may get the request."""

    retriable = True


class Chosen(NamedTuple):
    """A choice with what it was made from."""

    weighed: Weighed
    choice: Choice
    prefill_tokens: int
    """Tokens that the worker must compute, those on slower tiers in part."""
    found: Found
    everyone: Weighed
    """Those whom the request did not permit, too."""

    @property
    def row(self) -> int:
        """The chosen row of the roster."""
        return self.weighed.rows[self.choice.row]


class Ranking(NamedTuple):
    """The candidates of a choice, as its record describes them."""

    workers: Sequence[str]
    dp_ranks: Sequence[int]
    held: Tokens
    """[n] tokens of the prompt, on any tier."""
    costs: npt.NDArray[np.float64]
    """[n]"""


class Selector:
    """Chooses workers for the prompts of one service. One thread calls it."""

    def __init__(self, rosters: Rosters, create_policy: Callable[[], Policy], replica: str) -> None:
        """create_policy: called once for each model and tenant. replica: name of this process in records."""
        self._rosters = rosters
        self._create_policy = create_policy
        self._policies: dict[tuple[str, str], Policy] = {}
        self._replica = replica
        self.num_named = 0
        """Reservations that were named here."""

    def weigh(self, namespace: Namespace, freshness: Freshness, found: Found, now: float) -> Weighed:
        """Return the candidates for a prompt. Raises NoCandidateError."""
        weighed = self._rosters.candidates(namespace, freshness, found, now)
        if not weighed.rows:
            raise NoCandidateError("no schedulable workers are available")
        return weighed

    def choose(
        self, request: SelectRequest, namespace: Namespace, freshness: Freshness, found: Found, now: float
    ) -> Chosen:
        """Choose a worker for a prompt. now: seconds since 1970. Raises NoCandidateError."""
        weighed = everyone = self.weigh(namespace, freshness, found, now)
        if request.allowed_worker_ids is not None or request.pinned_worker is not None:
            weighed = weighed.among(_allowed(request, weighed.candidates))
            if not weighed.rows:
                raise NoCandidateError("no endpoints available to route work")
        asked = asked_of(request, found, now)
        choice = self._policy(namespace).choose(asked, weighed.candidates)
        if request.affinity_target is not None:
            worker, rank = str(request.affinity_target.worker_id), request.affinity_target.dp_rank
            places = zip(weighed.candidates.workers, weighed.candidates.dp_ranks, strict=True)
            row = next((i for i, each in enumerate(places) if each[0] == worker and rank in (None, each[1])), None)
            if row is not None:
                choice = preferred(choice, row, "the target of the request")
        return Chosen(weighed, choice, round(weighed.candidates.computed.item(choice.row)), found, everyone)

    def work(self, request: SelectRequest, namespace: Namespace, now: float) -> tuple[Roster, float] | None:
        """Return what `least_work` needs to choose for requests like this one now. None: only `choose` can."""
        policy, block_size = self._policy(namespace), namespace.key.block_size
        scale = policy.scale_of_work(_options(request), block_size) if isinstance(policy, LeastWork) else None
        return None if scale is None else (self._rosters.of(namespace, now), scale)

    def _policy(self, namespace: Namespace) -> Policy:
        scope = namespace.key[:2]
        policy = self._policies.get(scope)
        if policy is None:
            if len(self._policies) == _MAX_POLICIES:
                self._policies.clear()  # what they remember of earlier choices is lost
            policy = self._policies[scope] = self._create_policy()
        return policy

    def records(self, request: SelectRequest, chosen: Chosen, namespace: Namespace, now: float) -> list[Reserved]:
        """Return the reservations of a choice: of the request and, if another worker computes its prompt, of that."""
        name, choice = request.selection_id or self._next_name(), chosen.choice
        candidates, prompt = chosen.weighed.candidates, (chosen.found.tokens, chosen.found.hashes)
        ranking = Ranking(candidates.workers, candidates.dp_ranks, candidates.held[:, -1], choice.costs)
        if choice.prefill is None:
            return [self._record(name, choice.row, chosen.prefill_tokens, request, ranking, prompt, namespace, now)]
        computed = round(candidates.computed.item(choice.prefill))
        return [
            self._record(name, choice.row, 0, request, ranking, prompt, namespace, now),
            self._record(prefill_name(name), choice.prefill, computed, request, ranking, prompt, namespace, now),
        ]

    def booked(
        self, bookings: Bookings, request: SelectRequest, roster: Roster, namespace: Namespace, now: float
    ) -> Iterator[tuple[Reserved, int, int]]:
        """Yield the reservations that a kernel has booked for requests like this one.

        Each with its place and the number of its pages that were booked. Their names have the next numbers.
        """
        begin, made, first = 0, int(bookings.made[0]), self.num_named + 1
        self.num_named += made  # the callers have these names already
        for i, numbers in enumerate(bookings.numbers[:made].tolist()):
            row, count, tokens, prefill_tokens, end, place, num_pages = numbers
            workers, dp_ranks = roster.workers, roster.dp_ranks
            if count < len(workers):
                rows = bookings.rows[i, :count].tolist()
                workers, dp_ranks = [workers[each] for each in rows], [dp_ranks[each] for each in rows]
            ranking = Ranking(workers, dp_ranks, bookings.held[i, :count], bookings.costs[i, :count])
            name, prompt = f"{self.names}{first + i}", (tokens, bookings.hashes[begin:end])
            record = self._record(name, row, prefill_tokens, request, ranking, prompt, namespace, now)
            yield record, place, num_pages
            begin = end

    @property
    def names(self) -> str:
        """The beginning of names that are given here. A number follows: see `num_named`."""
        return f"{self._replica}-"

    def _next_name(self) -> str:
        self.num_named += 1
        return f"{self.names}{self.num_named}"

    def _record(
        self,
        name: str,
        row: int,
        prefill_tokens: int,
        request: SelectRequest,
        ranking: Ranking,
        prompt: tuple[int, U64Array],
        namespace: Namespace,
        now: float,
    ) -> Reserved:
        """row: the chosen candidate. prompt: its tokens, and the hashes of its pages."""
        tokens, hashes = prompt
        decision = Decision(
            VERSION,
            name,
            now,
            *namespace.key,
            tokens,
            hashes[:MAX_PAGES_PER_DECISION].astype("<u8", copy=False).tobytes(),
            ranking.workers[row],
            ranking.dp_ranks[row],
            ranking.held.item(row),
            _shown(ranking, row),
        )
        return Reserved(VERSION, self._replica, decision, prefill_tokens, _session(request))


def prefill_name(reservation_id: str) -> str:
    """Return the id under which the worker is booked that computes the prompt of a request for another one."""
    return f"{reservation_id}/prefill"


def asked_of(request: SelectRequest, found: Found, now: float) -> Asked:
    """Return what a policy needs to know about a request. now: seconds since 1970."""
    priority = request.strict_priority + request.priority_jump
    return Asked(found.tokens, _session(request), priority, _options(request), now)


def _options(request: SelectRequest) -> dict[str, float]:
    given = request.router_config_override
    if given is None:
        return {}
    return {name: value for name in given.__struct_fields__ if (value := getattr(given, name)) is not None}


def _session(request: SelectRequest) -> str:
    return request.session_id or (request.session_context.session_id if request.session_context else "")


def _allowed(request: SelectRequest, candidates: Candidates) -> list[int]:
    rows = list(range(len(candidates.workers)))
    if request.allowed_worker_ids is not None:
        names = set(map(str, request.allowed_worker_ids))
        rows = [row for row in rows if candidates.workers[row] in names]
    if (pinned := request.pinned_worker) is not None:
        place = str(pinned.worker_id), pinned.dp_rank
        rows = [row for row in rows if (candidates.workers[row], candidates.dp_ranks[row]) == place]
    return rows


def _shown(ranking: Ranking, chosen: int) -> list[Candidate]:
    """Return the cheapest candidates and the chosen one, as a decision records them."""
    rows = list(range(len(ranking.workers)))
    if len(rows) > _MAX_CANDIDATES:
        rows = ranking.costs.argsort()[:_MAX_CANDIDATES].tolist()
        if chosen not in rows:
            rows[-1] = chosen
    workers, dp_ranks, held, costs = ranking.workers, ranking.dp_ranks, ranking.held.tolist(), ranking.costs.tolist()
    return [Candidate(workers[row], dp_ranks[row], held[row], -costs[row]) for row in rows]
