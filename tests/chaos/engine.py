"""An engine of a chaos run: a real cache with three tiers that evicts all the time, and a real publisher.

Usage: `python -m tests.chaos.engine JSON`, with the publisher's settings in `KVSIGHT_*` variables. The JSON object has
the fields of `EngineOptions`. The engine serves requests at a steady rate. `Engine` lists the orders that it takes.

After each request, and after each eviction for one, it appends a row to its history: the time (of the monotonic clock,
which all processes share) and the digest of its cache, counted from a walk of the cache. The publisher's ledger is not
asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kv_events.schema import MEDIA
from kv_events.streams import StreamId
from tests.support.controlled_process import ControlledProcess, say
from tests.support.stepped_clock import SteppedClock

if TYPE_CHECKING:
    from publisher import EventPublisher
    from simulation import Request, SimulatedWorker

HISTORY_ROW = np.dtype([("at", "<f8"), ("digest", "<u8", (2 * len(MEDIA),))])
BLOCK_SIZE = 16
_PINNED_PAGES = 24
PINNED_TOKENS = _PINNED_PAGES * BLOCK_SIZE
_BURST_PROMPT_PAGES = 128
_VOCABULARY = 100_000
_KEEPS_PINNED = 10
"""Every so many requests, the pinned prompt is requested again."""


class EngineOptions(msgspec.Struct, kw_only=True):
    """What an engine is made of."""

    history: str
    """File of the history."""
    cache: str = "hiradix"
    """A kind of `simulation.CACHES`."""
    device_pages: int = 256
    seed: int = 0
    requests_per_s: float = 8.0
    queue_pages: int = 1_000_000
    """Bound of the publisher's queue."""


class Truth(msgspec.Struct):
    """What the cache of an engine holds."""

    pages: dict[str, list[int]]
    """Medium -> sequence hashes."""
    digest: str
    """As `GET /workers` shows it."""


class EngineStats(msgspec.Struct):
    epoch: int
    resync_pages: int
    resyncs: int
    queued: int
    dropped: int
    requests: int


def pinned_prompt(worker: str) -> list[int]:
    """Return the prompt that a worker's device holds all the time."""
    tokens: list[int] = _random_tokens(sum(worker.encode()), PINNED_TOKENS).tolist()
    return tokens


class Engine:
    """The engine process of one worker, over its restarts."""

    def __init__(self, worker: str, folder: Path, variables: dict[str, Any], tenant: str, **options: Any) -> None:
        """variables: `KVSIGHT_*` settings that name broker and topics. options: fields of `EngineOptions`."""
        self.name = worker
        self.stream = StreamId("m", tenant, worker, 0)
        self.log = folder / f"engine-{worker}.log"
        self.history = folder / f"history-{worker}"
        self.clock = SteppedClock(folder / f"clock-{worker}")
        self.variables: dict[str, Any] = {
            **variables,
            "KVSIGHT_MODEL": self.stream.model,
            "KVSIGHT_TENANT": tenant,
            "KVSIGHT_WORKER": worker,
            "KVSIGHT_BLOCK_SIZE": BLOCK_SIZE,
            **self.clock,
        }
        """Its settings. A change counts from the next start on."""
        self.options = options
        self._process: ControlledProcess | None = None
        self._starts = 0

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def epoch(self) -> int:
        return int(self._running_process.greeting)

    def start(self) -> None:
        """Start with an empty cache. Returns when the publisher has started."""
        assert self._process is None
        self.history.unlink(missing_ok=True)
        self._starts += 1
        given = {"seed": self._starts + sum(self.name.encode()), "history": str(self.history), **self.options}
        self._process = ControlledProcess(__name__, [json.dumps(given)], self.variables, self.log)

    def kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.close_streams()

    def pause(self) -> None:
        self._running_process.pause()

    def resume(self) -> None:
        self._running_process.resume()

    def order(self, command: str, *arguments: object) -> Any:
        """Give an order that `_run` knows: rest, work, harm with kind and number of records, or left to harm."""
        return self._running_process.order(command, *arguments)

    def burst(self, pages: int) -> float:
        return float(self._running_process.order("burst", pages))

    def truth(self) -> Truth:
        return msgspec.convert(self._running_process.order("truth"), Truth)

    def stats(self) -> EngineStats:
        return msgspec.convert(self._running_process.order("stats"), EngineStats)

    def rows(self) -> npt.NDArray[Any]:
        """Return its history: rows of HISTORY_ROW."""
        try:
            written = self.history.read_bytes()
        except FileNotFoundError:
            written = b""
        return np.frombuffer(written[: len(written) // HISTORY_ROW.itemsize * HISTORY_ROW.itemsize], HISTORY_ROW)

    @property
    def _running_process(self) -> ControlledProcess:
        if self._process is None:
            raise EOFError(f"engine {self.name} is dead")
        return self._process


def _random_tokens(seed: int, number: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, _VOCABULARY, number, dtype=np.uint32)


# --- inside the process -----------------------------------------------------------------------------------------------


class _Life:
    """The engine itself."""

    def __init__(self, options: EngineOptions, worker: SimulatedWorker, name: str) -> None:
        self.worker = worker
        self.num_requests = 0
        self._requests = self._workload(options.seed, pinned_prompt(name))
        self._history = os.open(options.history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._evict, worker.cache.evict = worker.cache.evict, self._evict_and_note  # type: ignore[method-assign]

    def serve(self) -> None:
        self.worker.serve(next(self._requests))
        self.num_requests += 1
        self.note()

    def _evict_and_note(self, params: Any) -> Any:
        result = self._evict(params)
        self.note()
        return result

    def note(self) -> None:
        row = np.array([(time.monotonic(), self.digest(self.held()))], HISTORY_ROW)
        os.write(self._history, row.tobytes())

    def burst(self, pages: int) -> None:
        from simulation.workload import Request

        for _ in range(-(-pages // _BURST_PROMPT_PAGES)):
            seed = int.from_bytes(os.urandom(4))
            self.worker.serve(Request(0.0, _random_tokens(seed, _BURST_PROMPT_PAGES * BLOCK_SIZE)))
            self.note()

    def held(self) -> dict[str, npt.NDArray[np.uint64]]:
        from simulation.worker import held_pages

        found = {medium.value: held_pages(self.worker, medium) for medium in MEDIA}
        assert not any(nameless for _, nameless in found.values()), "every page on disk is announced"
        return {medium: pages for medium, (pages, _) in found.items()}

    @staticmethod
    def digest(held: dict[str, npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
        xors = [np.bitwise_xor.reduce(_mixed(pages), initial=0) for pages in held.values()]
        return np.array([*map(len, held.values()), *xors], np.uint64)

    @staticmethod
    def _workload(seed: int, pinned: list[int]) -> Iterator[Request]:
        from simulation import Request, WorkloadSettings, generate

        again = Request(0.0, np.array(pinned, np.uint32))
        for part in count(seed, 1000):
            for number, request in enumerate(generate(WorkloadSettings(seed=part, num_requests=500))):
                if number % _KEEPS_PINNED == 0:
                    yield again
                yield request


def _mixed(pages: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix hashes as the digest does: SplitMix64, written a second time."""
    x = pages + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _lock(worker: SimulatedWorker, tokens: list[int]) -> None:
    """Protect a prompt from eviction for good."""
    from engine_cache import MatchPrefixParams, RadixKey

    match = worker.cache.match_prefix(MatchPrefixParams(RadixKey(np.array(tokens, np.uint32))))
    assert len(match.device_indices) == len(tokens), (len(match.device_indices), len(tokens))
    worker.cache.inc_lock_ref(match.last_device_node)


def _main(options: EngineOptions) -> None:
    from publisher import EventPublisher, PublisherSettings
    from publisher.sinks import create_sink
    from simulation import SimulatedWorker, SimulationSettings, create_cache
    from simulation.workload import Request
    from tests.chaos.harmful_sink import HarmfulSink

    settings = PublisherSettings(queue_pages=options.queue_pages)
    sink = HarmfulSink(create_sink(settings))
    publisher = EventPublisher(settings, sink)
    capacity = SimulationSettings(
        cache=options.cache, capacity_tokens=options.device_pages * BLOCK_SIZE, page_size=BLOCK_SIZE, disk_ratio=3.0
    )
    worker = SimulatedWorker(publisher, create_cache(capacity))
    pinned = pinned_prompt(settings.worker)
    worker.serve(Request(0.0, np.array(pinned, np.uint32)))
    _lock(worker, pinned)
    life = _Life(options, worker, settings.worker)
    life.note()
    with publisher:
        say(publisher.epoch)
        _run(options, life, publisher, sink)


def _run(options: EngineOptions, life: _Life, publisher: EventPublisher, sink: Any) -> None:
    """Serve requests and take orders, until stdin ends."""
    is_working, due = True, time.monotonic()
    while True:
        wait_s = max(0.0, due - time.monotonic()) if is_working else None
        if not select.select([sys.stdin], [], [], wait_s)[0]:
            life.serve()
            due = max(due + 1 / options.requests_per_s, time.monotonic())
            continue
        line = sys.stdin.readline()
        if not line:
            return
        answer: Any = None
        match json.loads(line):
            case ["rest"]:
                is_working = False
            case ["work"]:
                is_working, due = True, time.monotonic()
            case ["burst", pages]:
                began = time.monotonic()
                life.burst(pages)
                answer = time.monotonic() - began
            case ["harm", harm, records]:
                sink.harm_next(harm, records)
            case ["left to harm"]:
                answer = sink.num_left
            case ["truth"]:
                held = life.held()
                digest = life.digest(held).astype("<u8").tobytes().hex()
                answer = {"pages": {medium: pages.tolist() for medium, pages in held.items()}, "digest": digest}
            case ["stats"]:
                stats = publisher.stats()
                answer = {
                    "epoch": publisher.epoch,
                    "resync_pages": stats.resync_pages,
                    "resyncs": stats.resyncs,
                    "queued": stats.queued + stats.in_flight,
                    "dropped": stats.dropped,
                    "requests": life.num_requests,
                }
            case order:
                raise ValueError(f"unknown order {order}")
        say(answer)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _main(msgspec.json.decode(sys.argv[1], type=EngineOptions))
