"""GET /funnel: the decisions that routers reported, and what the engines reused, over the last hour.

The figures are those of the routers. `kvsight audit` compares them with the log and finds out where tokens were lost.
"""

from collections import OrderedDict, deque
from typing import Final

import msgspec

from kv_events.decisions import Decision, DecisionRecord
from kv_events.http.fleet import DecisionFunnel, FunnelSums, RecentDecision

WINDOW_S: Final = 3600.0

_BUCKET_S: Final = 60
_MAX_BUCKETS = 3000
"""Times are at most a day from the time of their report."""
_SHOWN = 50
_MAX_WAITING = 20_000
_FIELDS = FunnelSums.__struct_fields__


class DecisionWindow:
    """Sums decisions by the minute of their time. Outcomes count in the minute of their decision.

    Bounded: the sums of 3000 minutes, the newest decisions, and 20,000 decisions that wait for their outcome.
    """

    def __init__(self) -> None:
        self._all: dict[int, list[int]] = {}
        self._finished: dict[int, list[int]] = {}
        self._waiting: OrderedDict[str, RecentDecision] = OrderedDict()
        self._recent: deque[RecentDecision] = deque(maxlen=_SHOWN)
        self._early: OrderedDict[str, int] = OrderedDict()  # outcomes that came before their decision

    def take(self, record: DecisionRecord) -> None:
        """Count a decision, or finish it with its outcome."""
        if isinstance(record, Decision):
            self._decide(record)
        else:
            self._finish(record.request_id, record.cached_tokens)

    def report(self, now: float) -> DecisionFunnel:
        """Return the funnel of the hour before `now`, in seconds since 1970."""
        recent = [each for each in self._recent if each.time > now - WINDOW_S]
        return DecisionFunnel(
            time=now,
            window_s=WINDOW_S,
            all=_sum(self._all, now),
            finished=_sum(self._finished, now),
            decisions=sorted(recent, key=lambda each: -each.time),
        )

    def _decide(self, decision: Decision) -> None:
        if decision.request_id in self._waiting:
            return  # reported twice
        seen = RecentDecision(
            request_id=decision.request_id,
            time=decision.timestamp,
            model=decision.model,
            tenant=decision.tenant,
            worker=decision.worker,
            dp_rank=decision.dp_rank,
            prompt_tokens=decision.prompt_tokens,
            best_tokens=max((each.tokens for each in decision.candidates), default=None),
            predicted_tokens=decision.predicted_tokens,
        )
        _add(self._all, seen)
        self._recent.append(seen)
        self._waiting[seen.request_id] = seen
        early = self._early.pop(seen.request_id, None)
        if early is not None:
            self._finish(seen.request_id, early)
        elif len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)

    def _finish(self, request_id: str, cached_tokens: int) -> None:
        chosen = self._waiting.pop(request_id, None)
        if chosen is None:
            self._early[request_id] = cached_tokens
            if len(self._early) > _MAX_WAITING:
                self._early.popitem(last=False)
            return
        finished = msgspec.structs.replace(chosen, cached_tokens=cached_tokens)
        _add(self._finished, finished)
        for number, each in enumerate(self._recent):
            if each is chosen:
                self._recent[number] = finished


def _add(buckets: dict[int, list[int]], seen: RecentDecision) -> None:
    predicted = seen.predicted_tokens or 0
    best = predicted if seen.best_tokens is None else max(predicted, seen.best_tokens)
    sums = buckets.setdefault(int(seen.time // _BUCKET_S), [0] * len(_FIELDS))
    for column, count in enumerate((1, seen.prompt_tokens, best, predicted, seen.cached_tokens or 0)):
        sums[column] += count
    while len(buckets) > _MAX_BUCKETS:
        del buckets[min(buckets)]


def _sum(buckets: dict[int, list[int]], now: float) -> FunnelSums:
    first, last = int((now - WINDOW_S) // _BUCKET_S), int(now // _BUCKET_S)
    rows = [sums for minute, sums in buckets.items() if first < minute <= last]
    totals = [sum(column) for column in zip(*rows, strict=True)]
    return FunnelSums(**dict(zip(_FIELDS, totals, strict=bool(totals))))
