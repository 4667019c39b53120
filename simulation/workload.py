"""Requests, and where they come from: generated workloads, and Mooncake traces.

Workloads have conversations that share system prompts, agent loops, bursts:

chat    system prompt | user | answer | user | answer ...            long pauses between turns
agent   system prompt | task | call | tool result | call ...         a fast-growing context, short pauses
burst   many sessions start at the same time with one system prompt
        several sub-agents start at the same time with the context of their agent

Mooncake traces have real arrival times and prompt lengths, with contents known only by block. Each line is a JSON
object: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, each of which
identifies a block of 512 tokens together with its prefix. Equal ids become equal tokens and different ids different
tokens, so prefixes are shared exactly as in the original.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

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

BLOCK_TOKENS = 512
MAX_HASH_ID = 2**53 - 1
"""Largest integer that every JSON reader represents exactly."""
MAX_OUTPUT = 2**20

_TOKEN_BITS = 17  # a vocabulary of 131,072
_POSITIONS = np.arange(BLOCK_TOKENS, dtype=np.uint64)

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


class _Row(NamedTuple):
    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: npt.NDArray[np.uint64]


class MooncakeTrace:
    """The requests of a trace, in order of arrival. Each iteration computes the tokens again, which is cheaper than
    keeping them.

    path: `.jsonl` or `.jsonl.gz`. The whole file is checked at once; raises InvalidValueError naming the file, the
    line, the field and its value. Of outputs, only the lengths are known.
    """

    def __init__(self, path: Path) -> None:
        rows = [_row(line, f"{path}, line {number}") for number, line in _lines(path)]
        if not rows:
            raise InvalidValueError("trace", path, "at least one request")
        self._rows = sorted(rows, key=lambda row: row.arrival_s)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Request]:
        for number, row in enumerate(self._rows):
            tokens = block_tokens(row.hash_ids)[: row.input_length]
            yield Request(row.arrival_s, tokens, session=f"request-{number}", output_length=row.output_length)


def block_tokens(hash_ids: npt.NDArray[np.uint64]) -> U32Array:
    """Return uint32[512 * n]: the tokens of n blocks. hash_ids: uint64[n], at most `MAX_HASH_ID`."""
    # splitmix64 of (id, position) is a bijection on 64 bits, so that no two blocks agree in 64 tokens
    mixed = (hash_ids[:, None] * np.uint64(BLOCK_TOKENS) + _POSITIONS).reshape(-1)
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(64 - _TOKEN_BITS)).astype(np.uint32)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidValueError("trace", path, f"a readable .jsonl or .jsonl.gz file ({error})") from error


def _row(line: bytes, where: str) -> _Row:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValueError(where, line.decode(errors="replace"), f"a JSON object ({error})") from None
    if not isinstance(fields, dict):
        raise InvalidValueError(where, fields, "a JSON object")
    given = {name: fields.get(name, "nothing") for name in ("timestamp", "input_length", "output_length", "hash_ids")}
    if not isinstance(given["hash_ids"], list):
        raise InvalidValueError(f"{where}: hash_ids", given["hash_ids"], "a list of integers")
    arrival_ms = _checked(given["timestamp"], f"{where}: timestamp", (int, float), "milliseconds, not negative")
    for name in ("input_length", "output_length"):
        _checked(given[name], f"{where}: {name}", (int,), "an integer, not negative")
    for position, hash_id in enumerate(given["hash_ids"]):
        _checked(hash_id, f"{where}: hash_ids[{position}]", (int,), f"an integer in 0 .. {MAX_HASH_ID}")
    if given["output_length"] > MAX_OUTPUT:
        raise InvalidValueError(f"{where}: output_length", given["output_length"], f"0 .. {MAX_OUTPUT}")
    input_length, num_blocks = given["input_length"], len(given["hash_ids"])
    if not 1 <= input_length <= num_blocks * BLOCK_TOKENS:
        expected = f"1 .. {num_blocks * BLOCK_TOKENS}: {num_blocks} hash_ids of {BLOCK_TOKENS} tokens"
        raise InvalidValueError(f"{where}: input_length", input_length, expected)
    return _Row(arrival_ms / 1000, input_length, given["output_length"], np.array(given["hash_ids"], np.uint64))


def _checked(value: Any, where: str, kinds: tuple[type, ...], expected: str) -> float:
    if type(value) not in kinds or not 0 <= value <= MAX_HASH_ID:
        raise InvalidValueError(where, value, expected)
    return float(value)
