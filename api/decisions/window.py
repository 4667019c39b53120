"""GET /funnel: what routers reported and services chose, and what the engines reused, and where tokens were lost.

The figures are those of whoever chose. `kvsight audit` compares them with the log and finds out where tokens were lost.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from kv_events.decisions import Choices, Decision, DecisionRecord, Outcome
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
_Choice: TypeAlias = Decision | bytes
"""A decision, or the record of its reservation."""
_Unread: TypeAlias = Choices | Decision
_Example: TypeAlias = tuple[_Choice, int | None]
"""A choice, and what the engine reused."""


class DecisionWindow:
    """Sums decisions by the minute of their time. Outcomes count in the minute of their decision.

    Bounded: the sums of 3000 minutes, some hundred examples, and the newest decisions, of which 20,000 wait for their
    outcome, or 32 MiB.
    """

    def __init__(self) -> None:
        self._all: dict[int, list[int]] = {}
        self._finished: dict[int, list[int]] = {}
        self._waiting: OrderedDict[str, _Choice] = OrderedDict()
        self._waiting_bytes = 0
        self._unread: deque[_Unread] = deque()  # they count, and wait, too
        self._num_unread = self._unread_bytes = 0
        self._recent: deque[tuple[str, _Choice, int | None]] = deque(maxlen=_SHOWN)  # with what the engine reused
        self._early: OrderedDict[str, int] = OrderedDict()  # outcomes that came before their decision
        self._losing: dict[int, dict[tuple[str, str], list[int]]] = {}  # minute -> key -> requests and tokens
        self._examples: OrderedDict[tuple[str, str], _Example] = OrderedDict()  # newest last

    def take(self, record: DecisionRecord) -> None:
        """Count a decision, or finish it with its outcome.

        An id that waits for its outcome counts once, or, while choices are unread, once they are read.
        """
        if isinstance(record, Outcome):
            self._read()
            self._finish(record.request_id, record.cached_tokens)
        elif self._unread:  # to read them takes milliseconds, in which nothing else is answered
            self._count(record)
            self._put_unread(record)
        elif record.request_id.removesuffix(AT_PREFILL) not in self._waiting:
            # not reported twice, nor counted with the worker that goes on with it
            self._count(record)
            self._wait(record.request_id, record)
            self._trim()

    def take_all(self, choices: Choices) -> None:
        """Count choices that were made at once.

        As long as no outcome is reported, most are forgotten unread. An id may then count each time.
        """
        _add(self._all, choices.timestamp, choices.sums)
        for worker, requests, tokens, number in choices.lost:
            self._lose("choice", worker, (requests, tokens), choices.record(number), choices.timestamp)
        self._put_unread(choices)

    def _put_unread(self, unread: _Unread) -> None:
        self._count_unread(unread, 1)
        self._unread.append(unread)
        if self._finished or self._early:
            self._read()
        while self._unread and (
            self._num_unread - _size(self._unread[0])[0] >= _MAX_UNANSWERED or self._unread_bytes > _MAX_WAITING_BYTES
        ):
            self._count_unread(self._unread.popleft(), -1)

    def _count_unread(self, unread: _Unread, sign: int) -> None:
        num_choices, num_bytes = _size(unread)
        self._num_unread += sign * num_choices
        self._unread_bytes += sign * num_bytes

    def _read(self) -> None:
        """Let the choices wait one by one."""
        while self._unread:
            unread = self._unread.popleft()
            self._count_unread(unread, -1)
            for name, choice in _each(unread):
                if name.removesuffix(AT_PREFILL) in self._waiting:
                    self._count(_decision(choice), -1)  # it counted before it was read
                else:
                    self._wait(name, choice)
        self._trim()

    def _count(self, decision: Decision, sign: int = 1) -> None:
        """Add a decision to the sums. sign: -1 takes it away again."""
        _add(self._all, decision.timestamp, [sign * each for each in _sums(decision)])
        lost = _best(decision) - (decision.predicted_tokens or 0)
        if lost > 0 and decision.predicted_tokens is not None:
            self._lose("choice", decision.worker, (sign, sign * lost), decision, decision.timestamp)

    def _wait(self, name: str, choice: _Choice) -> None:
        if self._num_unread < _SHOWN:
            self._recent.append((name, _shortened(choice), None))
        self._waiting[name] = choice
        self._waiting_bytes += _num_bytes(choice)
        if self._early and (early := self._early.pop(name, None)) is not None:
            self._finish(name, early)

    def _trim(self) -> None:
        """Forget those that have waited for the longest time, if there are too many."""
        most = _MAX_WAITING if self._finished or self._early else _MAX_UNANSWERED
        while len(self._waiting) > most or self._waiting_bytes > _MAX_WAITING_BYTES:
            self._waiting_bytes -= _num_bytes(self._waiting.popitem(last=False)[1])

    def report(self, now: float, range_s: float = WINDOW_S) -> DecisionFunnel:
        """Return the funnel of the hour before `now`, in seconds since 1970. range_s: of the curve."""
        self._read()
        everything, finished = (_curve(each, now, WINDOW_S, WINDOW_S)[0] for each in (self._all, self._finished))
        step_s = float(max(_BUCKET_S, round(range_s / _STEPS / _BUCKET_S) * _BUCKET_S))
        found = [(_decision(choice), cached_tokens) for _, choice, cached_tokens in self._recent]
        recent = [_seen(*each) for each in found if each[0].timestamp > now - WINDOW_S]
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
        totals: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for minute, losing in self._losing.items():
            for key, (requests, tokens) in losing.items() if minute > (now - WINDOW_S) // _BUCKET_S else ():
                totals[key][0] += requests
                totals[key][1] += tokens
        sums = {key: lost for key, lost in totals.items() if lost[0]}
        known = {key: lost for key, lost in sums.items() if key in self._examples}
        largest = sorted(known.items(), key=lambda item: -item[1][1])[:_MAX_LOSSES]
        losses = [_loss(*key, requests, tokens, self._examples[key]) for key, (requests, tokens) in largest]
        causes: Counter[str] = Counter()
        for (cause, _), (_, tokens) in sums.items():
            causes[cause] += tokens
        return {"lost": dict(causes), "losses": losses}

    def _lose(
        self, cause: str, worker: str, lost: tuple[int, int], example: _Choice, at: float, cached: int | None = None
    ) -> None:
        """Count requests that lost tokens. lost: how many requests and tokens; below 0, they were counted twice.

        at: seconds since 1970. cached: tokens that the engine reused of the example.
        """
        key, minutes = (cause, worker), self._losing
        losing = minutes.setdefault(int(at // _BUCKET_S), {})
        while len(minutes) > WINDOW_S // _BUCKET_S + 1:
            del minutes[min(minutes)]
        if key not in losing and len(losing) >= _MAX_LOSING:
            return
        sums = losing.setdefault(key, [0, 0])
        sums[0] += lost[0]
        sums[1] += lost[1]
        if lost[0] > 0:
            self._examples[key] = _shortened(example), cached
            self._examples.move_to_end(key)
        if len(self._examples) > _MAX_LOSING:
            self._examples.popitem(last=False)

    def _finish(self, request_id: str, cached_tokens: int) -> None:
        choice = self._waiting.pop(request_id, None)
        if choice is None:
            self._early[request_id] = cached_tokens
            if len(self._early) > _MAX_WAITING:
                self._early.popitem(last=False)
            return
        self._waiting_bytes -= _num_bytes(choice)
        decision = _decision(choice)
        _add(self._finished, decision.timestamp, _sums(decision, cached_tokens))
        if (lost := (decision.predicted_tokens or 0) - cached_tokens) > 0:
            self._lose("engine", decision.worker, (1, lost), choice, decision.timestamp, cached_tokens)
        for number, (name, each, _) in enumerate(self._recent):
            if name == request_id:
                self._recent[number] = name, each, cached_tokens


def _num_bytes(choice: _Choice) -> int:
    """Return about what a choice takes in memory."""
    if isinstance(choice, bytes):
        return _DECISION_BYTES + len(choice)
    return _DECISION_BYTES + len(choice.sequence_hashes) + _CANDIDATE_BYTES * len(choice.candidates)


def _size(unread: _Unread) -> tuple[int, int]:
    """Return the number of choices, and about the bytes that they take in memory."""
    return (len(unread.ends), len(unread.records)) if isinstance(unread, Choices) else (1, _num_bytes(unread))


def _each(unread: _Unread) -> Iterator[tuple[str, _Choice]]:
    if isinstance(unread, Choices):
        yield from ((unread.name(number), unread.record(number)) for number in range(len(unread.ends)))
    else:
        yield unread.request_id, unread


def _shortened(choice: _Choice) -> _Choice:
    """Return a choice without most of its pages and all but the best candidate, if they take much memory."""
    if _num_bytes(choice) <= _MAX_EXAMPLE_BYTES:
        return choice
    decision = _decision(choice)
    best = sorted(decision.candidates, key=lambda each: -each.tokens)[:1]
    pages = decision.sequence_hashes[: 8 * _EXAMPLE_PAGES]
    return msgspec.structs.replace(decision, sequence_hashes=pages, candidates=tuple(best))


def _decision(choice: _Choice) -> Decision:
    found = decode_choice(Channel.RESERVATIONS, choice) if isinstance(choice, bytes) else choice
    assert isinstance(found, Decision)
    return found


def _best(decision: Decision) -> int:
    """Return what the best candidate held, 0 if there are none."""
    return max([each.tokens for each in decision.candidates], default=0)


def _seen(decision: Decision, cached_tokens: int | None) -> RecentDecision:
    return RecentDecision(
        request_id=decision.request_id,
        time=decision.timestamp,
        model=decision.model,
        tenant=decision.tenant,
        worker=decision.worker,
        dp_rank=decision.dp_rank,
        prompt_tokens=decision.prompt_tokens,
        best_tokens=_best(decision) if decision.candidates else None,
        predicted_tokens=decision.predicted_tokens,
        cached_tokens=cached_tokens,
    )


def _sums(decision: Decision, cached_tokens: int = 0) -> tuple[int, ...]:
    """Return what a decision adds to sums, in the order of `FunnelSums`."""
    predicted = decision.predicted_tokens or 0
    return 1, decision.prompt_tokens, max(predicted, _best(decision)), predicted, cached_tokens


def _add(buckets: dict[int, list[int]], at: float, added: Sequence[int]) -> None:
    minute = int(at // _BUCKET_S)
    sums = buckets.get(minute)
    if sums is None:
        sums = buckets[minute] = [0] * len(_FIELDS)
        while len(buckets) > _MAX_BUCKETS:
            del buckets[min(buckets)]
    for number, value in enumerate(added):
        sums[number] += value


def _curve(buckets: Mapping[int, list[int]], now: float, range_s: float, step_s: float) -> list[FunnelSums]:
    """Return the sums of each step of the time before `now`, oldest first."""
    steps = [[0] * len(_FIELDS) for _ in range(round(range_s / step_s))]
    for minute, sums in buckets.items():
        step = len(steps) - 1 - int((int(now // _BUCKET_S) - minute) * _BUCKET_S // step_s)
        if 0 <= step < len(steps):
            steps[step] = [a + b for a, b in zip(steps[step], sums, strict=True)]
    return [FunnelSums(**dict(zip(_FIELDS, sums, strict=True))) for sums in steps]


def _loss(cause: str, worker: str, requests: int, tokens: int, example: _Example) -> Loss:
    decision, cached_tokens = _decision(example[0]), example[1]
    body = {"model_name": decision.model, "routing_group": decision.tenant, "worker": worker, "at": decision.timestamp}
    hashes = np.frombuffer(decision.sequence_hashes[: 8 * _EXAMPLE_PAGES], "<u8").tolist()
    text = msgspec.json.encode({**body, "seq_hashes": hashes}).decode() if hashes else ""
    seen = _seen(decision, cached_tokens)
    return Loss(cause=cause, worker=worker, requests=requests, tokens=tokens, example=seen, explain=text)
