"""Requests, and generated workloads: conversations that share system prompts, agent loops, bursts.

chat    system prompt | user | answer | user | answer ...            long pauses between turns
agent   system prompt | task | call | tool result | call ...         a fast-growing context, short pauses
burst   many sessions start at the same time with one system prompt
        several sub-agents start at the same time with the context of their agent
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from kv_events.errors import InvalidValueError, check_positive
from kv_events.hashing import U32Array

_VOCABULARY = 128_000
_SECONDS_PER_OUTPUT_TOKEN = 0.02
_BURST_SPREAD_S = 0.5
_MEAN_SYSTEM_TOKENS = 1200
_LENGTH_SIGMA = 0.6  # spread of the log-normal lengths
DEMO_TOKENS = 2048
_LENGTHS = 4
_REPEAT_EVERY = 50
"""So often that the cache never evicts it."""
_SEED_STEP = 1000

NO_TOKENS: U32Array = np.zeros(0, np.uint32)


class Request(NamedTuple):
    """One request with its prompt."""

    arrival_s: float
    """Arrival, in seconds since the workload began."""
    token_ids: U32Array
    """uint32[n], the prompt."""
    output_tokens: U32Array = NO_TOKENS
    """uint32[m], the tokens that the engine will generate; empty if the workload does not contain them."""
    session: str = ""
    """The conversation or loop that it belongs to."""
    extra_key: str | None = None
    """Namespace of its pages (adapter, cache salt)."""
    output_length: int = 0
    """Tokens that the engine will generate, if the workload does not contain them."""

    @property
    def num_output(self) -> int:
        """Tokens that the engine will generate, at least 1."""
        return max(1, len(self.output_tokens), self.output_length)


class Requests(Protocol):
    """A workload, which can be iterated any number of times, in order of arrival. A list of requests is one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Raises InvalidValueError naming the field of a bad value."""

    num_requests: int = 2000
    seed: int = 0
    num_system_prompts: int = 12
    """Number of system prompts. Their popularity falls as 1 / rank."""
    sessions_per_s: float = 2.0
    """Rate at which sessions or bursts start."""
    agent_share: float = 0.3
    """Probability that a session is an agent loop."""
    burst_share: float = 0.05
    """Probability that a session starts a burst of `burst_sessions`."""
    burst_sessions: int = 20
    subagent_share: float = 0.0
    """Probability that a call of an agent starts `subagents` at the same time, with its context."""
    subagents: int = 4

    def __post_init__(self) -> None:
        check_positive(num_requests=self.num_requests, num_system_prompts=self.num_system_prompts)
        check_positive(burst_sessions=self.burst_sessions, subagents=self.subagents)
        for name in ("agent_share", "burst_share", "subagent_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidValueError(name, getattr(self, name), "0 .. 1")
        if self.seed < 0:
            raise InvalidValueError("seed", self.seed, "an integer, not negative")
        if not self.sessions_per_s > 0:
            raise InvalidValueError("sessions_per_s", self.sessions_per_s, "more than 0")


class _Kind(NamedTuple):
    name: str
    turns: float
    input_tokens: float
    output_tokens: float
    pause_s: float


_CHAT = _Kind("chat", turns=5, input_tokens=150, output_tokens=300, pause_s=15)
_AGENT = _Kind("agent", turns=12, input_tokens=700, output_tokens=120, pause_s=1)
_SUBAGENT = _AGENT._replace(name="subagent", turns=4)


def generate(settings: WorkloadSettings) -> list[Request]:
    """Return `num_requests` requests in order of arrival. Equal settings give equal requests."""
    return _Generator(settings).requests()


class _Generator:
    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings
        self._random = np.random.default_rng(settings.seed)
        self._system_prompts = [self._tokens(_MEAN_SYSTEM_TOKENS) for _ in range(settings.num_system_prompts)]
        weights = 1 / np.arange(1, settings.num_system_prompts + 1)
        self._popularity = weights / weights.sum()
        self._num_sessions = 0

    def requests(self) -> list[Request]:
        settings, found, now_s = self._settings, list[Request](), 0.0
        while len(found) < settings.num_requests:
            now_s += self._random.exponential(1 / settings.sessions_per_s)
            system = self._system_prompts[self._random.choice(settings.num_system_prompts, p=self._popularity)]
            is_burst = self._random.random() < settings.burst_share
            for _ in range(settings.burst_sessions if is_burst else 1):
                found.extend(self._session(now_s + self._random.uniform(0, _BURST_SPREAD_S), system))
        found.sort(key=lambda request: request.arrival_s)
        return found[: settings.num_requests]

    def _session(self, now_s: float, context: U32Array) -> Iterator[Request]:
        kind = _AGENT if self._random.random() < self._settings.agent_share else _CHAT
        return self._turns(kind, now_s, context)

    def _turns(self, kind: _Kind, now_s: float, context: U32Array) -> Iterator[Request]:
        """Yield prompts, each of which consists of the previous one, its answer, and new tokens."""
        self._num_sessions += 1
        session = f"{kind.name}-{self._num_sessions}"
        for _ in range(self._random.geometric(1 / kind.turns)):
            context = np.concatenate((context, self._tokens(kind.input_tokens)))
            output = self._tokens(kind.output_tokens)
            yield Request(now_s, context, output, session)
            context = np.concatenate((context, output))
            now_s += len(output) * _SECONDS_PER_OUTPUT_TOKEN + self._random.exponential(kind.pause_s)
            share = self._settings.subagent_share
            if share and kind is _AGENT and self._random.random() < share:
                for _ in range(self._settings.subagents):
                    yield from self._turns(_SUBAGENT, now_s, context)

    def _tokens(self, mean_length: float) -> U32Array:
        length = self._random.lognormal(np.log(mean_length) - _LENGTH_SIGMA**2 / 2, _LENGTH_SIGMA)
        return self._random.integers(0, _VOCABULARY, 1 + int(length), dtype=np.uint32)


def demo_prompt() -> U32Array:
    """Return the prompt: uint32[DEMO_TOKENS], always the same."""
    return np.random.default_rng(0).integers(0, _VOCABULARY, DEMO_TOKENS, dtype=np.uint32)


def kept_part(seed: int) -> U32Array:
    """Return the beginning of the prompt that an engine with this seed keeps: all, a half, a quarter or an eighth."""
    return demo_prompt()[: DEMO_TOKENS >> seed % _LENGTHS]


def engine_requests(seed: int) -> Iterator[Request]:
    """Yield the requests of a simulated engine, without end. Engines with other seeds, below 1000, get others.

    The first one, and one in 50 from there on, is the engine's part of the demo prompt.
    """
    kept = Request(0.0, kept_part(seed))
    workload = (request for part in count(seed, _SEED_STEP) for request in generate(WorkloadSettings(seed=part)))
    for number, request in enumerate(workload):
        if number % _REPEAT_EVERY == 0:
            yield kept
        yield request
