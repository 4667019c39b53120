"""Policies: which candidate gets a request.

Names can be joined with commas. `session`, `session-hard`, `warm-up` and `prefill-decode` come before the policy that
decides in all other cases: `session,warm-up,overlap-load`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points

import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError
from selection.candidates import Asked, Candidates, Choice, Policy, selected
from selection.kernels.choose import least_work, lowest_cost

ENTRY_POINTS = "kvsight.policies"
DEFAULT_POLICY = "overlap-load"
LEAST_WORK = "the least work for prefill and decode"
"""The reason of `OverlapLoadPolicy`."""

_MAX_SESSIONS = 2**17
_SESSION_S = 3600.0
_ENOUGH_HELD = 0.9
_COLD = 0.5

Costs = npt.NDArray[np.float64]

_random = np.random.default_rng()
_turn = [int(_random.integers(2**32))]  # so that replicas do not begin with the same worker


class OverlapLoadPolicy:
    """Adds pages to compute, of this prompt and of those booked before, and pages that are held for booked requests.

    The cost of Dynamo 1.6.1: prefill_load_scale * prefill tokens / block size + decode blocks. Tokens on the host count
    0.75 and tokens on disks 0.25 of those on the device. router_temperature: above 0, higher costs are chosen, too,
    with the probability of a softmax over the costs, which are divided by their range first.
    """

    def choose(self, asked: Asked, candidates: Candidates) -> Choice:
        scale = asked.options.get("prefill_load_scale", 1.0) / candidates.block_size
        prefill, computed, blocks = candidates.prefill_tokens, candidates.computed, candidates.decode_blocks
        costs = np.empty(len(computed))
        row = least_work(prefill, computed, blocks, scale, next_turns(), costs)
        if temperature := asked.options.get("router_temperature"):
            row = _by_temperature(costs, temperature)
        return Choice(row, costs, LEAST_WORK)

    def scale_of_work(self, options: Mapping[str, float], block_size: int) -> float | None:
        """Return the scale with which kernels choose, see `least_work`. None: with these options, only `choose` can."""
        scale = options.get("prefill_load_scale", 1.0) / block_size
        return None if options.get("router_temperature") else scale


class LmetricPolicy:
    """Multiplies tokens that wait to be computed, those of this prompt included, by the size of the batch.

    The product needs no weight between cache and load. Source: "LMetric: Simple is Better - Multiplication May Be All
    You Need for LLM Request Scheduling" (2026).
    """

    def choose(self, asked: Asked, candidates: Candidates) -> Choice:
        waiting = candidates.prefill_tokens + candidates.computed
        costs: Costs = np.maximum(waiting, 1.0) * (candidates.requests + 1)
        return Choice(lowest(costs, candidates), costs, "the lowest product of tokens to compute and requests")


class PriorityPolicy:
    """Weighs booked work by 2 ** priority: an urgent request would rather compute more than wait.

    A request of priority 0 is placed as by `overlap-load`. Priorities count from -4 to 4.
    """

    def choose(self, asked: Asked, candidates: Candidates) -> Choice:
        own = candidates.computed / candidates.block_size
        booked = candidates.prefill_tokens / candidates.block_size + candidates.decode_blocks
        costs = own + booked * 2.0 ** min(4.0, max(-4.0, asked.priority))
        return Choice(
            lowest(costs, candidates), costs, f"the least work, booked work weighed for priority {asked.priority:g}"
        )


class SessionPolicy:
    """Keeps a conversation on the worker that served it last.

    is_hard: always. Otherwise, until another worker costs less than half as much.
    """

    def __init__(self, inner: Policy, *, is_hard: bool = False) -> None:
        self._inner = inner
        self._is_hard = is_hard
        self._seen: OrderedDict[str, tuple[tuple[str, int], float]] = OrderedDict()  # place, time

    def choose(self, asked: Asked, candidates: Candidates) -> Choice:
        choice = self._inner.choose(asked, candidates)
        if not asked.session:
            return choice
        place, seen_at = self._seen.get(asked.session, (None, 0.0))
        places = list(zip(candidates.workers, candidates.dp_ranks, strict=True))
        if place in places and asked.now - seen_at <= _SESSION_S:
            choice = preferred(choice, places.index(place), "the worker of this session", is_always=self._is_hard)
        self._seen[asked.session] = places[choice.row], asked.now
        self._seen.move_to_end(asked.session)
        if len(self._seen) > _MAX_SESSIONS:
            self._seen.popitem(last=False)
        return choice


class WarmUpPolicy:
    """Gives a cold worker, one with fewer than half the pages of the median, its share of the requests.

    Otherwise, a worker that is new or was emptied gets no request whose prompt another one holds.
    """

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self._credit: defaultdict[tuple[str, int], float] = defaultdict(float)

    def choose(self, asked: Asked, candidates: Candidates) -> Choice:
        choice = self._inner.choose(asked, candidates)
        cold = np.flatnonzero(candidates.pages < _COLD * np.median(candidates.pages)).tolist()
        if not cold:
            self._credit.clear()
            return choice
        for index in cold:
            self._credit[_place(candidates, index)] += 1 / len(candidates.workers)
        if choice.row not in cold:
            poorest = max(cold, key=lambda index: self._credit[_place(candidates, index)])
            if self._credit[_place(candidates, poorest)] < 1:
                return choice
            choice = choice._replace(row=poorest, reason="its share, while it holds few pages")
        self._credit[_place(candidates, choice.row)] -= 1
        return choice


class PrefillDecodePolicy:
    """Chooses a worker for decode, and another one for prefill unless the first holds nine tenths of the prompt.

    Workers whose role is "" can do both, and are used for both.
    """

    def __init__(self, inner: Policy) -> None:
        self._inner = inner

    def choose(self, asked: Asked, candidates: Candidates) -> Choice:
        decoders = [index for index, role in enumerate(candidates.roles) if role != "prefill"]
        choice = self._inner.choose(asked, candidates)
        if decoders and len(decoders) < len(candidates.roles):
            choice = self._among(asked, candidates, decoders)
        prefillers = [index for index, role in enumerate(candidates.roles) if role == "prefill"]
        held = int(candidates.predicted[choice.row])
        if not prefillers or held >= _ENOUGH_HELD * asked.prompt_tokens or choice.row in prefillers:
            return choice
        prefill = self._among(asked, candidates, prefillers).row
        return choice._replace(prefill=prefill, reason=f"{choice.reason}; {candidates.workers[prefill]} for prefill")

    def _among(self, asked: Asked, candidates: Candidates, rows: list[int]) -> Choice:
        choice = self._inner.choose(asked, selected(candidates, rows))
        costs = np.full(len(candidates.workers), np.inf)
        costs[rows] = choice.costs
        return choice._replace(row=rows[choice.row], costs=costs)


POLICIES: dict[str, Callable[[], Policy]] = {
    DEFAULT_POLICY: OverlapLoadPolicy,
    "lmetric": LmetricPolicy,
    "priority": PriorityPolicy,
}
"""Name -> function that returns a policy which decides every case."""

WRAPPERS: dict[str, Callable[[Policy], Policy]] = {
    "session": SessionPolicy,
    "session-hard": lambda inner: SessionPolicy(inner, is_hard=True),
    "warm-up": WarmUpPolicy,
    "prefill-decode": PrefillDecodePolicy,
}
"""Name -> function that returns a policy which leaves some cases to another one."""


def create_policy(names: str) -> Policy:
    """Return a policy. names: joined with commas. Raises InvalidValueError."""
    *wrappers, last = [name.strip() for name in names.split(",")]
    create = POLICIES.get(last) or _offered().get(last)
    if create is None:
        known = ", ".join([*POLICIES, *_offered()])
        raise InvalidValueError("policy", last, f"one of {known}, perhaps after {', '.join(WRAPPERS)}")
    policy = create()
    for name in reversed(wrappers):
        if name not in WRAPPERS:
            raise InvalidValueError("policy", name, f"one of {', '.join(WRAPPERS)} before the last one")
        policy = WRAPPERS[name](policy)
    return policy


def _offered() -> dict[str, Callable[[], Policy]]:
    """Policies of other packages."""
    return {each.name: each.load() for each in entry_points(group=ENTRY_POINTS)}


def preferred(choice: Choice, row: int, reason: str, *, is_always: bool = False) -> Choice:
    """Return the choice of a candidate if it costs at most twice as much as the best one, or `is_always`."""
    if is_always or choice.costs[row] <= 2 * choice.costs[choice.row]:
        return choice._replace(row=row, reason=reason)
    return choice


def seed_choices(seed: int) -> None:
    """Make the choices among equals repeat themselves in this process, for simulations."""
    _random.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    _turn[0] = seed


def lowest(costs: Costs, candidates: Candidates) -> int:
    """Return the row with the lowest cost. Of several, those that compute least take turns."""
    return lowest_cost(costs, candidates.computed, next_turns())


def next_turns(count: int = 1) -> int:
    """Return the first turn of some choices among equals. See `lowest_cost`."""
    _turn[0] += count
    return _turn[0] - count + 1


def _by_temperature(costs: Costs, temperature: float) -> int:
    """Return a random row. See `OverlapLoadPolicy`."""
    weights = np.exp((costs.min() - costs) / (max(temperature, 1e-6) * max(float(np.ptp(costs)), 1e-9)))
    return int(_random.choice(len(costs), p=weights / weights.sum()))


def _place(candidates: Candidates, index: int) -> tuple[str, int]:
    return candidates.workers[index], candidates.dp_ranks[index]
