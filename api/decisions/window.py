"""GET /funnel: what routers reported and services chose, and what the engines reused, and where tokens were lost.

The figures are those of whoever chose. `kvsight audit` compares them with the log and finds out where tokens were lost.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from kv_events.decisions import Decision, DecisionRecord, Placed
from kv_events.http.fleet import DecisionFunnel, FunnelSums, Loss, RecentDecision
from kv_events.records import Channel
from kv_events.reservations import AT_PREFILL, decode_choice

WINDOW_S: Final = 3600.0

_BUCKET_S: Final = 60
_MAX_BUCKETS = 3000
"""Times are at most a day from the time of their report."""
_SHOWN = 50
_MAX_WAITING, _MAX_UNANSWERED = 20_000, 2_000
"""Bounds on the decisions that wait for an outcome: once outcomes are reported, and before."""
_MAX_WAITING_BYTES, _DECISION_BYTES, _CANDIDATE_BYTES = 32 * 2**20, 512, 128
_FIELDS = FunnelSums.__struct_fields__
_STEPS = 60
_MAX_LOSSES = 20
_MAX_LOSING = 512
"""Pairs of a cause and a worker for each minute. Losses of further ones count in the funnel alone."""
_EXAMPLE_PAGES = 512
"""The first pages of an example, which are asked about."""
_MAX_EXAMPLE_BYTES = 16_384


class DecisionWindow:
    """Sums decisions by the minute of their time. Outcomes count in the minute of their decision.

    Bounded: the sums of 3000 minutes, some hundred examples, and the newest decisions, of which 20,000 wait for their
    outcome, or 32 MiB.
    """

    def __init__(self) -> None:
        self._all: dict[int, list[int]] = {}
        self._finished: dict[int, list[int]] = {}
        self._waiting: OrderedDict[str, Placed] = OrderedDict()
        self._waiting_bytes = 0
        self._recent: deque[tuple[Placed, int | None]] = deque(maxlen=_SHOWN)  # with what the engine reused
        self._early: OrderedDict[str, int] = OrderedDict()  # outcomes that came before their decision
        self._losing: dict[int, dict[tuple[str, str], list[int]]] = {}  # minute -> key -> requests and tokens
        self._examples: OrderedDict[tuple[str, str], tuple[Placed, int | None]] = OrderedDict()  # newest last

    def take(self, record: DecisionRecord) -> None:
        """Count a decision, or finish it with its outcome."""
        if isinstance(record, Decision):
            self.decide([Placed.of(record)])
        else:
            self._finish(record.request_id, record.cached_tokens)

    def decide(self, choices: Iterable[Placed]) -> None:
        """Count choices."""
        for placed in choices:
            name = placed.request_id
            if name.removesuffix(AT_PREFILL) in self._waiting:
                continue  # reported twice, or counted with the worker that goes on with it
            _add(self._all, placed)
            if placed.best_tokens is not None and placed.predicted_tokens is not None:
                self._lose("choice", placed.best_tokens - placed.predicted_tokens, placed)
            self._recent.append((_shortened(placed), None))
            self._waiting[name] = placed
            self._waiting_bytes += _num_bytes(placed)
            if self._early and (early := self._early.pop(name, None)) is not None:
                self._finish(name, early)
        most = _MAX_WAITING if self._finished or self._early else _MAX_UNANSWERED
        while len(self._waiting) > most or self._waiting_bytes > _MAX_WAITING_BYTES:
            self._waiting_bytes -= _num_bytes(self._waiting.popitem(last=False)[1])

    def report(self, now: float, range_s: float = WINDOW_S) -> DecisionFunnel:
        """Return the funnel of the hour before `now`, in seconds since 1970. range_s: of the curve."""
        everything, finished = (_curve(each, now, WINDOW_S, WINDOW_S)[0] for each in (self._all, self._finished))
        step_s = float(max(_BUCKET_S, round(range_s / _STEPS / _BUCKET_S) * _BUCKET_S))
        recent = [_seen(*each) for each in self._recent if each[0].timestamp > now - WINDOW_S]
        return DecisionFunnel(
            time=now,
            window_s=WINDOW_S,
            all=everything,
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

    def _lose(self, cause: str, tokens: int, placed: Placed, cached_tokens: int | None = None) -> None:
        if tokens <= 0:
            return
        key, minutes = (cause, placed.worker), self._losing
        losing = minutes.setdefault(int(placed.timestamp // _BUCKET_S), {})
        while len(minutes) > WINDOW_S // _BUCKET_S + 1:
            del minutes[min(minutes)]
        if key not in losing and len(losing) >= _MAX_LOSING:
            return
        lost = losing.setdefault(key, [0, 0])
        lost[0] += 1
        lost[1] += tokens
        self._examples[key] = _shortened(placed), cached_tokens
        self._examples.move_to_end(key)
        if len(self._examples) > _MAX_LOSING:
            self._examples.popitem(last=False)

    def _finish(self, request_id: str, cached_tokens: int) -> None:
        placed = self._waiting.pop(request_id, None)
        if placed is None:
            self._early[request_id] = cached_tokens
            if len(self._early) > _MAX_WAITING:
                self._early.popitem(last=False)
            return
        self._waiting_bytes -= _num_bytes(placed)
        _add(self._finished, placed, cached_tokens)
        self._lose("engine", (placed.predicted_tokens or 0) - cached_tokens, placed, cached_tokens)
        for number, (each, _) in enumerate(self._recent):
            if each.request_id == request_id:
                self._recent[number] = each, cached_tokens


def _num_bytes(placed: Placed) -> int:
    """Return about what a choice takes in memory."""
    record = placed.record
    if isinstance(record, bytes):
        return _DECISION_BYTES + len(record)
    return _DECISION_BYTES + len(record.sequence_hashes) + _CANDIDATE_BYTES * len(record.candidates)


def _shortened(placed: Placed) -> Placed:
    """Return a choice without most of its pages and candidates, if they take much memory."""
    if _num_bytes(placed) <= _MAX_EXAMPLE_BYTES:
        return placed
    pages = _decision(placed).sequence_hashes[: 8 * _EXAMPLE_PAGES]
    record = msgspec.structs.replace(_decision(placed), sequence_hashes=pages, candidates=())
    return msgspec.structs.replace(placed, record=record)


def _decision(placed: Placed) -> Decision:
    record = placed.record
    found = decode_choice(Channel.RESERVATIONS, record) if isinstance(record, bytes) else record
    assert isinstance(found, Decision)
    return found


def _seen(placed: Placed, cached_tokens: int | None) -> RecentDecision:
    decision = _decision(placed)
    return RecentDecision(
        request_id=decision.request_id,
        time=decision.timestamp,
        model=decision.model,
        tenant=decision.tenant,
        worker=decision.worker,
        dp_rank=decision.dp_rank,
        prompt_tokens=decision.prompt_tokens,
        best_tokens=placed.best_tokens,
        predicted_tokens=decision.predicted_tokens,
        cached_tokens=cached_tokens,
    )


def _add(buckets: dict[int, list[int]], placed: Placed, cached_tokens: int = 0) -> None:
    predicted, minute = placed.predicted_tokens or 0, int(placed.timestamp // _BUCKET_S)
    sums = buckets.get(minute)
    if sums is None:
        sums = buckets[minute] = [0] * len(_FIELDS)
        while len(buckets) > _MAX_BUCKETS:
            del buckets[min(buckets)]
    sums[0] += 1
    sums[1] += placed.prompt_tokens
    sums[2] += max(predicted, placed.best_tokens or 0)
    sums[3] += predicted
    sums[4] += cached_tokens


def _curve(buckets: Mapping[int, list[int]], now: float, range_s: float, step_s: float) -> list[FunnelSums]:
    """Return the sums of each step of the time before `now`, oldest first."""
    steps = [[0] * len(_FIELDS) for _ in range(round(range_s / step_s))]
    for minute, sums in buckets.items():
        step = len(steps) - 1 - int((int(now // _BUCKET_S) - minute) * _BUCKET_S // step_s)
        if 0 <= step < len(steps):
            steps[step] = [a + b for a, b in zip(steps[step], sums, strict=True)]
    return [FunnelSums(**dict(zip(_FIELDS, sums, strict=True))) for sums in steps]


def _loss(cause: str, worker: str, requests: int, tokens: int, placed: Placed, cached_tokens: int | None) -> Loss:
    example = _seen(placed, cached_tokens)
    body = {"model_name": example.model, "routing_group": example.tenant, "worker": worker, "at": example.time}
    hashes = np.frombuffer(_decision(placed).sequence_hashes[: 8 * _EXAMPLE_PAGES], "<u8").tolist()
    text = msgspec.json.encode({**body, "seq_hashes": hashes}).decode() if hashes else ""
    return Loss(cause=cause, worker=worker, requests=requests, tokens=tokens, example=example, explain=text)
