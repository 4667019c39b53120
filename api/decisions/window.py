"""GET /funnel: what routers reported and services chose, and what the engines reused, and where tokens were lost.

The figures are those of whoever chose. `kvsight audit` compares them with the log and finds out where tokens were lost.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from kv_events.decisions import Decision, DecisionRecord
from kv_events.http.fleet import DecisionFunnel, FunnelSums, Loss, RecentDecision

WINDOW_S: Final = 3600.0

_BUCKET_S: Final = 60
_MAX_BUCKETS = 3000
"""Times are at most a day from the time of their report."""
_SHOWN = 50
_MAX_WAITING = 20_000
_FIELDS = FunnelSums.__struct_fields__
_STEPS = 60
_MAX_LOSSES = 20
_MAX_LOSING = 512
"""Pairs of a cause and a worker for each minute. Losses of further ones count in the funnel alone."""
_EXAMPLE_PAGES = 512
"""The first pages of an example, which are asked about."""
_MAX_PAGED = 2000
"""Decisions whose pages are kept until their outcome."""


class _Waiting(msgspec.Struct, gc=False):
    """A decision without an outcome."""

    seen: RecentDecision
    pages: bytes
    """The first hashes. Empty once there are many newer decisions."""


class DecisionWindow:
    """Sums decisions by the minute of their time. Outcomes count in the minute of their decision.

    Bounded: the sums of 3000 minutes, the newest decisions, and 20,000 decisions that wait for their outcome.
    """

    def __init__(self) -> None:
        self._all: dict[int, list[int]] = {}
        self._finished: dict[int, list[int]] = {}
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._paged: deque[_Waiting] = deque()
        self._recent: deque[RecentDecision] = deque(maxlen=_SHOWN)
        self._early: OrderedDict[str, int] = OrderedDict()  # outcomes that came before their decision
        self._losing: dict[int, dict[tuple[str, str], list[int]]] = {}  # minute -> key -> requests and tokens
        self._examples: OrderedDict[tuple[str, str], tuple[RecentDecision, bytes]] = OrderedDict()  # newest last

    def take(self, record: DecisionRecord) -> None:
        """Count a decision, or finish it with its outcome."""
        if isinstance(record, Decision):
            self._decide(record)
        else:
            self._finish(record.request_id, record.cached_tokens)

    def report(self, now: float, range_s: float = WINDOW_S) -> DecisionFunnel:
        """Return the funnel of the hour before `now`, in seconds since 1970. range_s: of the curve."""
        finished = _sum(self._finished, now)
        step_s = float(max(_BUCKET_S, round(range_s / _STEPS / _BUCKET_S) * _BUCKET_S))
        recent = [each for each in self._recent if each.time > now - WINDOW_S]
        return DecisionFunnel(
            time=now,
            window_s=WINDOW_S,
            all=_sum(self._all, now),
            finished=finished,
            decisions=sorted(recent, key=lambda each: -each.time),
            **self._losses(now),
            step_s=step_s,
            curve=_curve(self._finished if finished.requests else self._all, now, range_s, step_s),
        )

    def _losses(self, now: float) -> dict[str, Any]:
        """Return the fields `lost` and `losses`."""
        sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for minute, losing in self._losing.items():
            for key, (requests, tokens) in losing.items() if minute > (now - WINDOW_S) // _BUCKET_S else ():
                sums[key][0] += requests
                sums[key][1] += tokens
        known = {key: lost for key, lost in sums.items() if key in self._examples}
        largest = sorted(known.items(), key=lambda item: -item[1][1])[:_MAX_LOSSES]
        losses = [_loss(*key, requests, tokens, *self._examples[key]) for key, (requests, tokens) in largest]
        causes: Counter[str] = Counter()
        for (cause, _), (_, tokens) in sums.items():
            causes[cause] += tokens
        return {"lost": dict(causes), "losses": losses}

    def _lose(self, cause: str, tokens: int, seen: RecentDecision, pages: bytes) -> None:
        if tokens <= 0:
            return
        key, minutes = (cause, seen.worker), self._losing
        losing = minutes.setdefault(int(seen.time // _BUCKET_S), {})
        while len(minutes) > WINDOW_S // _BUCKET_S + 1:
            del minutes[min(minutes)]
        if key not in losing and len(losing) >= _MAX_LOSING:
            return
        lost = losing.setdefault(key, [0, 0])
        lost[0] += 1
        lost[1] += tokens
        self._examples[key] = seen, pages
        self._examples.move_to_end(key)
        if len(self._examples) > _MAX_LOSING:
            self._examples.popitem(last=False)

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
            best_tokens=max([each.tokens for each in decision.candidates], default=None),
            predicted_tokens=decision.predicted_tokens,
        )
        pages = decision.sequence_hashes[: 8 * _EXAMPLE_PAGES]
        _add(self._all, seen)
        if seen.best_tokens is not None and seen.predicted_tokens is not None:
            self._lose("choice", seen.best_tokens - seen.predicted_tokens, seen, pages)
        self._recent.append(seen)
        waiting = self._waiting[seen.request_id] = _Waiting(seen, pages)
        self._paged.append(waiting)
        if len(self._paged) > _MAX_PAGED:
            self._paged.popleft().pages = b""
        early = self._early.pop(seen.request_id, None) if self._early else None
        if early is not None:
            self._finish(seen.request_id, early)
        elif len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)

    def _finish(self, request_id: str, cached_tokens: int) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            self._early[request_id] = cached_tokens
            if len(self._early) > _MAX_WAITING:
                self._early.popitem(last=False)
            return
        finished = msgspec.structs.replace(waiting.seen, cached_tokens=cached_tokens)
        _add(self._finished, finished)
        self._lose("engine", (finished.predicted_tokens or 0) - cached_tokens, finished, waiting.pages)
        for number, each in enumerate(self._recent):
            if each is waiting.seen:
                self._recent[number] = finished


def _add(buckets: dict[int, list[int]], seen: RecentDecision) -> None:
    predicted = seen.predicted_tokens or 0
    best = predicted if seen.best_tokens is None else max(predicted, seen.best_tokens)
    minute = int(seen.time // _BUCKET_S)
    sums = buckets.get(minute)
    if sums is None:
        sums = buckets[minute] = [0] * len(_FIELDS)
        while len(buckets) > _MAX_BUCKETS:
            del buckets[min(buckets)]
    sums[0] += 1
    sums[1] += seen.prompt_tokens
    sums[2] += best
    sums[3] += predicted
    sums[4] += seen.cached_tokens or 0


def _sum(buckets: dict[int, list[int]], now: float) -> FunnelSums:
    first, last = int((now - WINDOW_S) // _BUCKET_S), int(now // _BUCKET_S)
    rows = [sums for minute, sums in buckets.items() if first < minute <= last]
    totals = [sum(column) for column in zip(*rows, strict=True)]
    return FunnelSums(**dict(zip(_FIELDS, totals, strict=bool(totals))))


def _curve(buckets: Mapping[int, list[int]], now: float, range_s: float, step_s: float) -> list[FunnelSums]:
    """Return the sums of each step of the time before `now`, oldest first."""
    steps = [[0] * len(_FIELDS) for _ in range(round(range_s / step_s))]
    for minute, sums in buckets.items():
        step = len(steps) - 1 - int((int(now // _BUCKET_S) - minute) * _BUCKET_S // step_s)
        if 0 <= step < len(steps):
            steps[step] = [a + b for a, b in zip(steps[step], sums, strict=True)]
    return [FunnelSums(**dict(zip(_FIELDS, sums, strict=True))) for sums in steps]


def _loss(cause: str, worker: str, requests: int, tokens: int, example: RecentDecision, pages: bytes) -> Loss:
    body = {"model_name": example.model, "routing_group": example.tenant, "worker": worker, "at": example.time}
    hashes = np.frombuffer(pages, "<u8").tolist()
    text = msgspec.json.encode({**body, "seq_hashes": hashes}).decode() if hashes else ""
    return Loss(cause=cause, worker=worker, requests=requests, tokens=tokens, example=example, explain=text)
