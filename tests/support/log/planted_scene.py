"""A log that is written record by record, in which noisy workers surround the one that is asked about."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kv_events.hashing import namespace_seed, sequence_hashes
from kv_events.log.moments import LogMoment
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, WireEvent
from tests.support.log.records import Stream, removed, stored

MODEL, TENANT = "model-a", "default"
VICTIM = "victim"
_START_S = 1_769_860_800.0


@dataclass
class Scene:
    """A log that is written record by record, with noisy workers beside the victim."""

    random: np.random.Generator
    body: dict[str, Any] = field(default_factory=dict)
    """The query."""
    records: list[LogRecord] = field(default_factory=list)
    until: LogMoment | None = None
    """The moment; None: the end of the log."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the indexer."""

    def __post_init__(self) -> None:
        self.now = _START_S
        self.block_size = int(self.random.choice([4, 16, 32]))
        self.num_pages = int(self.random.integers(6, 24))
        self.tokens = self.new_tokens(self.num_pages * self.block_size)
        self.body = {"model_name": MODEL, "token_ids": self.tokens}
        self.hashes = self.hashes_under()
        self.victim = self.stream(VICTIM)
        self.others = [self.stream(f"engine-{number}") for number in range(int(self.random.integers(2, 6)))]
        self._first_offset = int(self.random.integers(0, 10_000))
        self._prompts = [self.hashes, *(self._other_prompt() for _ in range(3))]
        self._silent: set[str] = set()

    def stream(self, worker: str, *, model: str = MODEL, tenant: str = TENANT, block_size: int | None = None) -> Stream:
        """Return a new worker stream, by default of the scene's model and block size."""
        stream = Stream(worker, model=model, tenant=tenant, block_size=block_size or self.block_size)
        stream.epoch = int(self.random.integers(1, 1000))
        return stream

    def new_tokens(self, count: int) -> list[int]:
        """Return random tokens."""
        tokens: list[int] = self.random.integers(0, 150_000, count).tolist()
        return tokens

    def hashes_under(
        self,
        *,
        lora: str | None = None,
        salt: str | None = None,
        seed: int | None = None,
        block_size: int | None = None,
        is_bigram: bool = False,
    ) -> list[int]:
        """Return the prompt's sequence hashes under some rule."""
        size = self.block_size if block_size is None else block_size
        names = namespace_seed(lora, salt, base=seed)
        hashes: list[int] = sequence_hashes(self.tokens, size, names, base=seed, is_bigram=is_bigram).tolist()
        return hashes

    def page(self, low: int = 0) -> int:
        """Return a random page of the prompt, counted from 0, not the last one."""
        return int(self.random.integers(low, self.num_pages - 1))

    def emit(self, record: LogRecord) -> int:
        """Append a record to the log. Returns its index."""
        index = len(self.records)
        self.records.append(record._replace(offset=self._first_offset + 2 * index))
        return index

    def send(self, stream: Stream, *events: WireEvent, **options: Any) -> int:
        """Append a batch to the log, a moment later. Returns its index."""
        self.now += float(self.random.uniform(0.001, 0.05))
        return self.emit(stream.batch(*events, now=self.now, **options))

    def lose(self, stream: Stream, *events: WireEvent) -> None:
        """Let a batch get lost on its way to the log."""
        stream.batch(*events, now=self.now)

    def store(self, stream: Stream, pages: Sequence[int], hashes: list[int] | None = None, tier: int = 0) -> int:
        """Store consecutive pages of the prompt. Returns the index of the record."""
        chain = self.hashes if hashes is None else hashes
        parent = chain[pages[0] - 1] if pages[0] else 0
        return self.send(stream, stored((parent, [chain[page] for page in pages]), tier=tier))

    def remove(self, stream: Stream, pages: Sequence[int], tier: int = 0) -> int:
        """Remove pages of the prompt from a tier. Returns the index of the record."""
        return self.send(stream, removed([self.hashes[page] for page in pages], tier=tier))

    def noise(self, most: int = 12) -> None:
        """Let the other workers do what workers do, and everyone send heartbeats."""
        for _ in range(int(self.random.integers(1, most)) if self.others else 0):
            self._noise_of(self.others[int(self.random.integers(len(self.others)))])
        self.heartbeats()

    def heartbeats(self) -> None:
        """Let every worker that is not silent send a heartbeat."""
        for stream in (self.victim, *self.others):
            if stream.id.worker not in self._silent and stream.seq:
                self.send(stream)

    def silence(self, worker: str) -> None:
        """Let a worker send no more heartbeats."""
        self._silent.add(worker)

    def _other_prompt(self) -> list[int]:
        """Return hashes of a prompt that shares a random prefix with the scene's."""
        shared = int(self.random.integers(0, self.num_pages))
        tokens = self.tokens[: shared * self.block_size] + self.new_tokens(6 * self.block_size)
        hashes: list[int] = sequence_hashes(tokens, self.block_size).tolist()
        return hashes

    def _noise_of(self, stream: Stream) -> None:
        chain = self._prompts[int(self.random.integers(len(self._prompts)))]
        depth = int(self.random.integers(1, len(chain) + 1))
        tier = int(self.random.integers(3))
        match int(self.random.integers(10)):
            case 0 | 1 | 2 | 3:
                self.send(stream, stored((0, chain[:depth]), tier=tier))
            case 4 | 5 | 6:
                self.send(stream, removed(chain[depth - 1 :], tier=tier))
            case 7:
                self.send(stream, AllBlocksCleared())
            case 8:
                stream.restart()
                self.send(stream, stored((0, chain[:depth])))
            case _ if stream.seq:
                self.lose(stream, stored((0, chain[:depth])))
                self.send(stream)
                self.emit(stream.resync(now=self.now))
            case _:
                self.send(stream)
