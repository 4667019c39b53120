"""Chooses the worker of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from kv_events.decisions import VERSION, Candidate, Decision
from kv_events.errors import KvsightError
from kv_events.http.selection import SelectRequest
from kv_events.limits import MAX_PAGES_PER_DECISION
from kv_events.reservations import Reserved
from kv_events.schema import NUM_MEDIA
from selection.candidates import Asked, Candidates, Choice, Policy, selected
from selection.kernels.booked import Bookings
from selection.policies import LeastWork, preferred
from selection.roster import Found, Roster, Rosters, Weighed

_MAX_CANDIDATES, _MAX_POLICIES = 16, 4096
_NOT_KNOWN = np.zeros(0, np.int32), np.zeros((0, NUM_MEDIA), np.uint32)


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
        if choice.prefill is None:
            return [self._record(name, choice.row, chosen.prefill_tokens, request, chosen, namespace, now)]
        computed = round(chosen.weighed.candidates.computed.item(choice.prefill))
        return [
            self._record(name, choice.row, 0, request, chosen, namespace, now),
            self._record(prefill_name(name), choice.prefill, computed, request, chosen, namespace, now),
        ]

    def booked(
        self, bookings: Bookings, request: SelectRequest, roster: Roster, namespace: Namespace, now: float
    ) -> Iterator[tuple[Reserved, int, int]]:
        """Yield the reservations that a kernel has booked for requests like this one.

        Each with its place and the number of its pages that were booked. Their names have the next numbers.
        """
        begin, everyone = 0, roster.candidates
        for i, made in enumerate(bookings.numbers[: bookings.made[0]].tolist()):
            row, count, tokens, prefill_tokens, end, place, num_pages = made
            rows = bookings.rows[i, :count].tolist()
            candidates = everyone if count == len(everyone.workers) else selected(everyone, rows)
            weighed = Weighed(roster, rows, candidates._replace(held=bookings.held[i, :count, None]))
            found = Found(bookings.hashes[begin:end], tokens, *_NOT_KNOWN)
            chosen = Chosen(weighed, Choice(row, bookings.costs[i, :count], ""), prefill_tokens, found, weighed)
            record = self._record(self._next_name(), row, prefill_tokens, request, chosen, namespace, now)
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
        chosen: Chosen,
        namespace: Namespace,
        now: float,
    ) -> Reserved:
        candidates, found = chosen.weighed.candidates, chosen.found
        decision = Decision(
            VERSION,
            name,
            now,
            *namespace.key,
            found.tokens,
            found.hashes[:MAX_PAGES_PER_DECISION].astype("<u8", copy=False).tobytes(),
            candidates.workers[row],
            candidates.dp_ranks[row],
            int(candidates.held[row, -1]),
            _candidates_of(candidates, chosen.choice.costs, row),
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


def _candidates_of(candidates: Candidates, costs_of: npt.NDArray[np.float64], chosen: int) -> list[Candidate]:
    """Return the cheapest candidates and the chosen one, as a decision records them."""
    rows = list(range(len(candidates.workers)))
    if len(rows) > _MAX_CANDIDATES:
        rows = costs_of.argsort()[:_MAX_CANDIDATES].tolist()
        if chosen not in rows:
            rows[-1] = chosen
    held, costs = candidates.held[:, -1].tolist(), costs_of.tolist()
    return [Candidate(candidates.workers[row], candidates.dp_ranks[row], held[row], -costs[row]) for row in rows]
