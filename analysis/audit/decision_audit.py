"""The funnel: from the tokens of prompts to the tokens that engines found in their caches, and where they were lost.

    prompt -> held somewhere in the fleet -> held by the chosen worker -> predicted by the router -> delivered

What workers held when a router chose is taken from the log, as of the time of the choice. The router's own view may
have been older; the difference is the cause `stale view`.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from statistics import median
from typing import NamedTuple

import numpy as np

from analysis.audit.curves import AuditCurves
from analysis.audit.report import Example, ExampleQuery, Funnel, Loss
from analysis.audit.residency import milliseconds
from analysis.audit.stream_audit import StreamAudit
from indexer.scores import WorkerScore, stream_scores, worker_scores
from kv_events.decisions import Candidate, Decision, DecisionRecord, Outcome
from kv_events.hashing import U64Array
from kv_events.reservations import ReservationRecord, Reserved, time_of
from kv_events.runtime.words import count, printable
from kv_events.streams import StreamId
from selection.book import Book, BookFullError
from selection.settings import SelectionSettings

HELD, CHOSEN, PREDICTED, DELIVERED = "held in the fleet", "held by the chosen worker", "predicted", "delivered"
"""The steps after the prompt."""

NEW, EVICTED_BEFORE, NO_PAGE = "not computed before", "evicted before", "no whole page"
NOT_ASKED, LOAD, STALE = "router did not ask", "load", "stale view"
NO_LOAD = "not by load"
NO_CANDIDATE, UNREPORTED = "not a candidate", "candidates not reported"
AGAINST_SCORES, WRONG_RANK = "chose against its own scores", "wrong rank"
EVICTED, ENGINE, MISMATCH = "evicted before arrival", "engine's own reason", "hash mismatch"
NO_OUTCOME, STORED_SINCE = "no outcome known", "stored after the choice"

_MAX_WAITING_BYTES = 2**29
"""Bound on the memory of decisions that wait for their outcome, about half a million."""
_DECISION_BYTES, _CANDIDATE_BYTES = 1000, 200
_MAX_DONE = 2**18
"""Ids that are remembered to find repeated decisions and outcomes."""
_EXAMPLES = 3
_MEASURES = ("request", "prefill token", "decode page")
"""Of what is booked on a worker, the one that is named first."""
_MOST_EARLY = 256
_MOST_UNHEARD = 1024


class _Chosen(NamedTuple):
    """A decision that waits for its outcome."""

    decision: Decision
    hashes: U64Array
    prompt_tokens: int
    held: int
    """Tokens that the chosen worker held."""
    best: int
    """Tokens that the worker held that held most."""
    known_pages: int
    """Leading pages of the prompt that any worker has ever held."""
    stream: int | None
    """Number of the chosen stream in the book."""
    since: int
    """Number of the last batch before the choice."""


class DecisionAudit:
    """Takes decisions and outcomes in the order of time, between the records of events."""

    def __init__(self, events: StreamAudit, selection: SelectionSettings, series: AuditCurves | None = None) -> None:
        self._events = events
        self._selection = selection
        self._series = series
        self._funnel = Funnel()
        self._waiting: OrderedDict[str, _Chosen] = OrderedDict()
        self._losses: dict[tuple[str, str], Loss] = {}
        self._gains: dict[tuple[str, str], Loss] = {}
        self._waiting_bytes = 0
        self._early: list[tuple[int, int, float]] = []
        """Stream, last page and time of predictions that came true, of pages that were not stored yet."""
        self._unheard = Counter[str]()
        """Chosen workers of which there was no batch yet -> requests."""
        self._booked: Book | None = None
        """What is reserved. None: the log has no reservations so far."""
        self._done: OrderedDict[int, None] = OrderedDict()
        """Hashes of the ids that have an outcome, the newest last."""

    def take(self, record: DecisionRecord | ReservationRecord) -> None:
        """Judge a decision, which may be that of a reservation, or finish it with its outcome."""
        if isinstance(record, Decision):
            self._decide(record)
        elif isinstance(record, Outcome):
            self._finish(record)
        else:
            self._book_record(record)

    def _book_record(self, record: ReservationRecord) -> None:
        if isinstance(record, Reserved):
            self._decide(record.decision)
        self._booked = self._booked or self._selection.book()
        with suppress(BookFullError):
            self._booked.apply(record, time_of(record))

    def report(self) -> Funnel:
        """Return the funnel. Called once, after the last record."""
        while self._waiting:
            self._give_up()
        funnel, known = self._funnel, self._events.workers
        funnel.unknown_workers = {worker: each for worker, each in self._unheard.items() if worker not in known}
        funnel.losses = _sorted(self._losses, funnel.prompt_tokens)
        funnel.gains = _sorted(self._gains, funnel.prompt_tokens)
        ages = (self._events.book.stored_after(stream, page, milliseconds(at)) for stream, page, at in self._early)
        funnel.early_s = median([ms for ms in ages if ms is not None] or [0]) / 1000
        return funnel

    # --- the choice -------------------------------------------------------------------------------------------------

    def _decide(self, decision: Decision) -> None:
        if decision.request_id in self._waiting or hash(decision.request_id) in self._done:
            self._funnel.duplicates += 1
            return
        hashes = np.frombuffer(decision.sequence_hashes, "<u8")
        scores = self._scores(decision, hashes)
        held = _of_choice(decision, scores.get(decision.worker))
        best = max((each.longest_matched for each in scores.values()), default=0)
        stream = self._stream_number(decision, scores.get(decision.worker))
        prompt_tokens = max(decision.prompt_tokens, len(hashes) * decision.block_size)
        key = self._events.namespace_number(decision.model, decision.tenant, decision.block_size)
        known = self._events.book.note_request(key, hashes)
        chosen = _Chosen(decision, hashes, prompt_tokens, held, best, known, stream, since=self._events.num_batches)
        funnel = self._funnel
        funnel.requests += 1
        if stream is None and (decision.worker in self._unheard or len(self._unheard) < _MOST_UNHEARD):
            self._unheard[decision.worker] += 1
        funnel.prompt_tokens += prompt_tokens
        funnel.held_in_fleet += best
        funnel.held_by_chosen += held
        funnel.predicted += decision.predicted_tokens or 0
        cause, better = self._why_not_the_best(decision, scores, best)
        _add(self._losses, chosen, CHOSEN, cause, best - held, better)
        if (tied := _tied(decision)) and decision.worker in tied:
            funnel.ties[decision.worker] = funnel.ties.get(decision.worker, 0) + 1
        predicted = decision.predicted_tokens
        if predicted is None:
            _add(self._losses, chosen, PREDICTED, NOT_ASKED, held)
        else:
            _add(self._losses, chosen, PREDICTED, STALE, held - predicted)
            _add(self._gains, chosen, PREDICTED, STALE, predicted - held)
        if self._series is not None:
            held_by = {worker: each.longest_matched for worker, each in scores.items()}
            offered = [held_by.get(each.worker, 0) for each in decision.candidates]
            at = milliseconds(decision.timestamp)
            self._series.note_choice(at, prompt_tokens, best, held, predicted or 0, offered)
        self._waiting[decision.request_id] = chosen
        self._waiting_bytes += _memory(decision)
        while self._waiting_bytes > _MAX_WAITING_BYTES:
            self._give_up()

    def _scores(self, decision: Decision, hashes: U64Array) -> dict[str, WorkerScore]:
        """Worker -> what it could reuse, according to the log."""
        replay = self._events.replay
        return {
            each.worker: each
            for namespace in replay.namespaces.find(decision.model, decision.tenant)
            if namespace.key.block_size == decision.block_size
            for each in worker_scores(
                stream_scores(namespace, hashes, replay.freshness, decision.prompt_tokens or None)
            )
        }

    def _why_not_the_best(self, decision: Decision, scores: Mapping[str, WorkerScore], best: int) -> tuple[str, str]:
        """Return why a router did not choose the worker that held most, and the two compared in words."""
        if better := _scored_higher(decision):
            cause = WRONG_RANK if better[0].worker == decision.worker else AGAINST_SCORES
            return cause, _scores_text(decision, *better)
        if decision.predicted_tokens is None:
            return NOT_ASKED, ""
        holders = {worker for worker, held in scores.items() if held.longest_matched == best}
        offered = [each for each in decision.candidates if each.worker in holders]
        if not offered:
            return NO_CANDIDATE if decision.candidates else UNREPORTED, ""
        holder = max(offered, key=lambda each: each.tokens)
        if holder.tokens <= decision.predicted_tokens:
            return STALE, ""
        return (LOAD, "") if self._booked is None else self._compared_loads(self._booked, decision, holder)

    def _compared_loads(self, book: Book, decision: Decision, holder: Candidate) -> tuple[str, str]:
        book.expire(decision.timestamp)
        scope = decision.model, decision.tenant
        of_holder = book.booked(StreamId(*scope, holder.worker, holder.dp_rank or 0))
        of_chosen = book.booked(StreamId(*scope, decision.worker, decision.dp_rank or 0))
        for theirs, own, noun in zip(of_holder, of_chosen, _MEASURES, strict=True):
            if theirs > own:
                text = f"{printable(holder.worker)} had {count(theirs, noun)} booked"
                return LOAD, f"{text}, {printable(decision.worker)} had {own:,}"
        booked = count(of_holder.requests, "request")
        return NO_LOAD, f"{printable(holder.worker)} had {booked} booked, no more than {printable(decision.worker)}"

    def _stream_number(self, decision: Decision, score_of_chosen: WorkerScore | None) -> int | None:
        rank = decision.dp_rank
        if rank is None:
            ranks = score_of_chosen.ranks if score_of_chosen is not None else {}
            rank = max(ranks, key=lambda each: ranks[each].external, default=0)
        return self._events.stream_number(StreamId(decision.model, decision.tenant, decision.worker, rank))

    def _lose_in_the_fleet(self, chosen: _Chosen, named: int = 0, delivered: int = 0) -> None:
        """Account for what no worker held: tokens [best, prompt).

        Of these, the engine had tokens [named, delivered) under other names than the log.
        """
        size, prompt = chosen.decision.block_size, chosen.prompt_tokens
        in_pages = len(chosen.hashes) * size
        known = max(chosen.best, chosen.known_pages * size)
        misnamed = range(max(named, chosen.best), min(delivered, prompt))
        for cause, start, stop in (
            (EVICTED_BEFORE, chosen.best, known),
            (NEW, known, max(known, in_pages)),
            (NO_PAGE, max(known, in_pages), prompt),
        ):
            inside = max(0, min(stop, misnamed.stop) - max(start, misnamed.start))
            _add(self._losses, chosen, HELD, cause, stop - start - inside)
            _add(self._losses, chosen, HELD, MISMATCH, inside)

    # --- the outcome ------------------------------------------------------------------------------------------------

    def _finish(self, outcome: Outcome) -> None:
        chosen = self._waiting.pop(outcome.request_id, None)
        if chosen is None:
            if hash(outcome.request_id) in self._done:
                self._funnel.duplicates += 1
            else:
                self._funnel.unmatched_outcomes += 1
            return
        self._waiting_bytes -= _memory(chosen.decision)
        self._done[hash(outcome.request_id)] = None
        if len(self._done) > _MAX_DONE:
            self._done.popitem(last=False)
        delivered = outcome.cached_tokens
        self._funnel.outcomes += 1
        self._funnel.delivered += delivered
        if self._series is not None:
            at = milliseconds(chosen.decision.timestamp)
            self._series.note_outcome(at, chosen.prompt_tokens, delivered)
        predicted = chosen.decision.predicted_tokens or 0
        if chosen.held < predicted <= delivered:
            self._note_early(chosen, predicted)
        named = delivered
        if delivered < predicted:
            self._explain_loss(chosen, predicted, delivered)
        elif delivered > predicted:
            named = self._explain_gain(chosen, predicted, delivered)
        self._lose_in_the_fleet(chosen, named, delivered)

    def _explain_loss(self, chosen: _Chosen, predicted: int, delivered: int) -> None:
        """Divide the tokens that were predicted and not delivered.

        Tokens that the worker did not hold at the choice were a wrong prediction. Of the others, those before the first
        page that was evicted since are lost by the engine, and those from that page on by eviction.
        """
        held = max(delivered, min(predicted, chosen.held))
        _add(self._losses, chosen, DELIVERED, STALE, predicted - held)
        lost_at = held
        size = chosen.decision.block_size
        if chosen.stream is not None and size:
            first, last = delivered // size, min(-(-held // size), len(chosen.hashes))
            page = self._events.book.first_lost(chosen.stream, chosen.hashes, first, last, chosen.since)
            lost_at = held if page == last else min(held, max(delivered, page * size))
        _add(self._losses, chosen, DELIVERED, EVICTED, held - lost_at)
        _add(self._losses, chosen, DELIVERED, ENGINE, lost_at - delivered)

    def _explain_gain(self, chosen: _Chosen, predicted: int, delivered: int) -> int:
        """Account for tokens that the engine had and the router did not expect.

        Returns the tokens up to which the log names the pages as the router does.
        """
        held = max(predicted, min(chosen.held, delivered))
        cause = NOT_ASKED if chosen.decision.predicted_tokens is None else STALE
        _add(self._gains, chosen, DELIVERED, cause, held - predicted)
        named, size = held, chosen.decision.block_size
        if chosen.stream is not None and size:
            first, last = held // size, min(-(-delivered // size), len(chosen.hashes))
            page = self._events.book.first_lost(chosen.stream, chosen.hashes, first, last)
            named = delivered if page == last else max(held, page * size)
        _add(self._gains, chosen, DELIVERED, STORED_SINCE, named - held)
        _add(self._gains, chosen, DELIVERED, MISMATCH, delivered - named)
        return named

    def _note_early(self, chosen: _Chosen, predicted: int) -> None:
        """Note a prediction that was true, although the pages were stored only after the choice."""
        self._funnel.early += 1
        last = -(-predicted // max(1, chosen.decision.block_size)) - 1
        if chosen.stream is not None and last < len(chosen.hashes) and len(self._early) < _MOST_EARLY:
            self._early.append((chosen.stream, int(chosen.hashes[last]), chosen.decision.timestamp))

    def _give_up(self) -> None:
        """The outcome of the oldest decision is not known."""
        _, chosen = self._waiting.popitem(last=False)
        self._waiting_bytes -= _memory(chosen.decision)
        self._lose_in_the_fleet(chosen)
        _add(self._losses, chosen, DELIVERED, NO_OUTCOME, chosen.decision.predicted_tokens or 0)


def _memory(decision: Decision) -> int:
    return _DECISION_BYTES + len(decision.sequence_hashes) + _CANDIDATE_BYTES * len(decision.candidates)


def _add(
    losses: dict[tuple[str, str], Loss], chosen: _Chosen, step: str, cause: str, tokens: int, better: str = ""
) -> None:
    """Count tokens of a request for one cause. Its examples are the requests with most tokens.

    better: see `Example`.
    """
    if tokens <= 0:
        return
    loss = losses.setdefault((step, cause), Loss(step=step, cause=cause))
    loss.tokens += tokens
    loss.requests += 1
    if len(loss.examples) < _EXAMPLES or tokens > loss.examples[-1].tokens:
        loss.examples = sorted([*loss.examples, _example(chosen, tokens, better)], key=lambda each: -each.tokens)[
            :_EXAMPLES
        ]


def _scores_text(decision: Decision, better: Candidate, score: float) -> str:
    rank = "" if better.dp_rank is None else f" rank {better.dp_rank}"
    chosen_rank = "" if decision.dp_rank is None else f" rank {decision.dp_rank}"
    text = f"{printable(better.worker)}{rank} scored {better.score:g}, "
    return text + f"the chosen {printable(decision.worker)}{chosen_rank} {score:g}"


def _example(chosen: _Chosen, tokens: int, better: str) -> Example:
    decision = chosen.decision
    query = ExampleQuery(model_name=decision.model, routing_group=decision.tenant, seq_hashes=chosen.hashes.tolist())
    return Example(
        request_id=decision.request_id,
        time=decision.timestamp,
        worker=decision.worker,
        tokens=tokens,
        query=query,
        better=better,
    )


def _sorted(losses: Mapping[tuple[str, str], Loss], prompt_tokens: int) -> list[Loss]:
    for loss in losses.values():
        loss.share = loss.tokens / max(1, prompt_tokens)
    return sorted(losses.values(), key=lambda loss: -loss.tokens)


def _of_choice(decision: Decision, held: WorkerScore | None) -> int:
    """Return the tokens that the chosen worker, or its chosen rank, held."""
    if held is None:
        return 0
    if decision.dp_rank is None:
        return held.longest_matched
    tiers = held.ranks.get(decision.dp_rank)
    return 0 if tiers is None else tiers.external


def _scored_higher(decision: Decision) -> tuple[Candidate, float] | None:
    """Return the candidate that the router scored highest, and the score of its choice; None if they are the same."""
    own = [each.score for each in decision.candidates if _is_chosen(decision, each)]
    if not own:
        return None
    best = max(decision.candidates, key=lambda each: each.score)
    return (best, max(own)) if best.score > max(own) else None


def _is_chosen(decision: Decision, candidate: Candidate) -> bool:
    is_rank = decision.dp_rank is None or candidate.dp_rank in (None, decision.dp_rank)
    return is_rank and candidate.worker == decision.worker


def _tied(decision: Decision) -> set[str]:
    """Return the workers that share the best score. Empty: one is the best."""
    best = max((each.score for each in decision.candidates), default=0.0)
    found = {each.worker for each in decision.candidates if each.score == best}
    return found if len(found) > 1 else set()
