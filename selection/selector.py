"""Chooses the worker of a request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from kv_events.decisions import VERSION, Candidate, Decision
from kv_events.errors import KvsightError
from kv_events.http.selection import SelectRequest
from kv_events.limits import MAX_PAGES_PER_DECISION
from kv_events.reservations import AT_PREFILL, Reserved
from selection.book import Book
from selection.candidates import Asked, Candidates, Choice, Policy
from selection.kernels.choose import shown_rows
from selection.policies import Costs, OverlapLoadPolicy, create_policy, preferred
from selection.roster import Found, Roster, Rosters, Weighed

MOST_SHOWN = 16
"""Bound on the candidates of a record."""
_MAX_POLICIES = 4096


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


class Selector:
    """Chooses workers for the prompts of one service. One thread calls it."""

    def __init__(self, rosters: Rosters, policy: str, replica: str, book: Book) -> None:
        """policy: its names, see `create_policy`; each model and tenant has its own. replica: name of this process in
        records. book: knows which names are in use.
        """
        self._book = book
        self._rosters = rosters
        self._policy_names = policy
        self._policies: dict[tuple[str, str], Policy] = {}
        self.replica = replica
        self.num_named = 0
        """Names that were given here."""

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
                reason = "allowed_worker_ids or pinned_worker names no worker that can be chosen"
                raise NoCandidateError(f"no endpoints available to route work: {reason}")
        priority = request.strict_priority + request.priority_jump
        asked = Asked(found.tokens, session_of(request), priority, _options(request), now)
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
        policy = self._policy(namespace)
        if type(policy) is not OverlapLoadPolicy:  # the one that kernels know; a derived one may choose otherwise
            return None
        scale = policy.scale_of_work(_options(request), namespace.key.block_size)
        return None if scale is None else (self._rosters.of(namespace, now), scale)

    def _policy(self, namespace: Namespace) -> Policy:
        """Return the policy of a model."""
        scope = namespace.key[:2]
        found = self._policies.get(scope)
        if found is None:
            if len(self._policies) == _MAX_POLICIES:
                self._policies.clear()  # what they remember of earlier choices is lost
            found = self._policies[scope] = create_policy(self._policy_names)
        return found

    def records(self, request: SelectRequest, chosen: Chosen, namespace: Namespace, now: float) -> list[Reserved]:
        """Return the reservations of a choice: of the request and, if another worker computes its prompt, of that."""
        name, choice, found = request.selection_id or self._take_name(), chosen.choice, chosen.found
        candidates, booked = chosen.weighed.candidates, [(name, choice.row, chosen.prefill_tokens)]
        if choice.prefill is not None:
            computed = round(candidates.computed.item(choice.prefill))
            booked = [(name, choice.row, 0), (name + AT_PREFILL, choice.prefill, computed)]
        pages = found.hashes[:MAX_PAGES_PER_DECISION].astype("<u8", copy=False).tobytes()
        records = []
        for record_id, row, tokens in booked:
            shown, index = _shown(candidates, choice.costs, row)
            place = shown[index].worker, shown[index].dp_rank, shown[index].tokens
            decision = Decision(VERSION, record_id, now, *namespace.key, found.tokens, pages, *place, shown)
            records.append(Reserved(VERSION, self.replica, decision, tokens, session_of(request)))
        return records

    @property
    def names(self) -> str:
        """The beginning of names that are given here. A number follows: see `num_named`."""
        return f"{self.replica}-"

    def _take_name(self) -> str:
        while True:
            self.num_named += 1
            name = f"{self.names}{self.num_named}"
            if name not in self._book:  # a caller can choose any
                return name


def _options(request: SelectRequest) -> dict[str, float]:
    given = request.router_config_override
    if given is None:
        return {}
    return {name: value for name in given.__struct_fields__ if (value := getattr(given, name)) is not None}


def session_of(request: SelectRequest) -> str:
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


def _shown(candidates: Candidates, costs: Costs, chosen: int) -> tuple[tuple[Candidate, ...], int]:
    """Return the candidates of a record, see `shown_rows`, and the index of the chosen one."""
    rows = np.empty(min(len(costs), MOST_SHOWN), np.int32)
    index = shown_rows(np.ascontiguousarray(costs, np.float64), chosen, rows)  # policies can be anyone's
    found = zip(rows.tolist(), candidates.held[rows, -1].tolist(), costs[rows].tolist(), strict=True)
    workers, dp_ranks = candidates.workers, candidates.dp_ranks
    return tuple(Candidate(workers[row], dp_ranks[row], held, -cost) for row, held, cost in found), index
