"""A bridge and POST /register against NVIDIA Dynamo's indexer: `python -m benchmarks.bench_bridge [--json FILE]`

One process simulates four engines. It sends the same messages over ZMQ to each reader in turn, as fast as the reader
receives them (the sender's queue is unbounded). Each engine first fills its cache. After that, each stored prompt
evicts another one, as in a busy engine. Timing starts after a warm-up, because readers that still allocate memory
measure the machine rather than themselves. Each reader is a separate process:

* `bridge`: a fleet with a log in memory; done when every event is in a publisher's ledger;
* `/register`: `kvsight serve` with engines registered over HTTP; done when a query finds every engine's last prompt;
* `peer`: Dynamo's standalone indexer, measured in the same way. Skipped if pip cannot install it.

There are two kinds of messages: "large events" with a whole prompt each, and "small events" with one page each, as
SGLang 0.5.13 sends them. A page counts when it is stored and when it is removed. Readers take turns in each round, so
that other load on the machine affects all of them equally.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from itertools import count
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop
import zmq

from benchmarks.peers.services import GIVE_UP_S, KVSIGHT, Service, dynamo, posted, running
from benchmarks.report import Figure, figure, main
from bridge import BridgeSettings, EngineSettings, Fleet
from kv_events.log.memory import MemoryLog
from kvsight.cli.shared.process import keep_freed_memory, load_kernels
from publisher.settings import PublisherSettings
from publisher.sinks.memory import MemorySink

ENGINES, BLOCK_SIZE, PROMPT_PAGES = 4, 16, 64
HELD_PROMPTS, WARM_UP_PROMPTS, TIMED_PROMPTS = 1024, 1536, 3072
"""Of each engine: prompts that fit into its cache, and prompts that evict others before and during the timed part."""
ROUNDS = 9
_POLL_S = 0.01
_PEER_THREADS = 4


class Kind(NamedTuple):
    """One kind of traffic."""

    name: str
    pages_per_event: int
    events_per_batch: int

    @property
    def num_events(self) -> int:
        """Timed events of all engines."""
        return self.num_pages // self.pages_per_event

    @property
    def num_pages(self) -> int:
        """Timed pages of all engines, stored and removed."""
        return ENGINES * TIMED_PROMPTS * PROMPT_PAGES * 2

    @property
    def num_events_before(self) -> int:
        """Events of all engines before the timed part."""
        return ENGINES * (HELD_PROMPTS + 2 * WARM_UP_PROMPTS) * PROMPT_PAGES // self.pages_per_event


KINDS = (Kind("large events", PROMPT_PAGES, 16), Kind("small events", 1, 64))


class Traffic(NamedTuple):
    """The messages of one engine."""

    before: list[bytes]
    timed: list[bytes]
    last_before: list[int]
    """Tokens of the last prompt before the timed part."""
    last: list[int]
    """Tokens of the last prompt."""


def traffic(kind: Kind, engine: int) -> Traffic:
    """Batches of one engine."""
    random = np.random.default_rng(engine)
    num_before = HELD_PROMPTS + WARM_UP_PROMPTS
    num_prompts = num_before + TIMED_PROMPTS
    prompts = random.integers(0, 128_000, (num_prompts, PROMPT_PAGES * BLOCK_SIZE)).tolist()
    names = ((engine + 1) << 40) + np.arange(num_prompts * PROMPT_PAGES).reshape(num_prompts, PROMPT_PAGES)
    before: list[Any] = []
    timed: list[Any] = []
    for number, tokens in enumerate(prompts):
        events = before if number < num_before else timed
        if number >= HELD_PROMPTS:
            # last pages are removed first, and the newest prompt is removed last
            events += _removed(names[number - HELD_PROMPTS, ::-1].tolist(), kind.pages_per_event)
        events += _stored(names[number].tolist(), tokens, kind.pages_per_event)
    return Traffic(_batches(before, kind), _batches(timed, kind), prompts[num_before - 1], prompts[-1])


def _stored(names: list[int], tokens: list[int], pages_per_event: int) -> list[Any]:
    events = []
    for page in range(0, PROMPT_PAGES, pages_per_event):
        part = tokens[page * BLOCK_SIZE : (page + pages_per_event) * BLOCK_SIZE]
        parent = names[page - 1] if page else None
        events.append(["BlockStored", names[page : page + pages_per_event], parent, part, BLOCK_SIZE, None, "GPU"])
    return events


def _removed(names: list[int], pages_per_event: int) -> list[Any]:
    return [["BlockRemoved", names[i : i + pages_per_event], "GPU"] for i in range(0, PROMPT_PAGES, pages_per_event)]


def _batches(events: list[Any], kind: Kind) -> list[bytes]:
    size = kind.events_per_batch
    parts = [events[start : start + size] for start in range(0, len(events), size)]
    return [msgspec.msgpack.encode([time.time(), part, 0]) for part in parts]


# --- the engines' process ---


def _send(pipe: Connection) -> None:
    """For each kind on stdin: bind, print the ports, wait for subscribers, and send each part on request."""
    prepared = {kind.name: [traffic(kind, engine) for engine in range(ENGINES)] for kind in KINDS}
    pipe.send({name: [(each.last_before, each.last) for each in engines] for name, engines in prepared.items()})
    while (name := pipe.recv()) is not None:
        context = zmq.Context()
        live = [context.socket(zmq.XPUB) for _ in range(ENGINES)]
        for each in live:
            each.setsockopt(zmq.SNDHWM, 0)
        pipe.send([each.bind_to_random_port("tcp://127.0.0.1") for each in live])
        for each in live:
            each.recv()
        seq = count()
        for part in range(2):
            pipe.send("ready")
            pipe.recv()
            for messages in zip(*(engine[part] for engine in prepared[name]), strict=True):
                number = next(seq).to_bytes(8, "big")
                for each, message in zip(live, messages, strict=True):
                    each.send_multipart((b"", number, message), copy=False)
        pipe.recv()
        context.destroy(linger=0)


class Engines:
    """The parent's end of the engines' process."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_send, args=(theirs,), daemon=True)
        self._process.start()
        self.last_prompts: dict[str, list[tuple[list[int], list[int]]]] = self._pipe.recv()
        """Last prompt of each part, by kind and engine."""

    def measured(self, kind: Kind, register: Callable[[list[str]], None], wait: Callable[[int], None]) -> float:
        """Return the seconds from the first timed message until the reader has received all of them.

        wait: called with the part (0: warm-up, 1: timed); returns when the reader has received it.
        """
        self._pipe.send(kind.name)
        register([f"tcp://127.0.0.1:{port}" for port in self._pipe.recv()])
        seconds = 0.0
        for part in range(2):
            self._pipe.recv()
            began = time.perf_counter()
            self._pipe.send("go")
            wait(part)
            seconds = time.perf_counter() - began
        self._pipe.send("done")
        return seconds

    def stop(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


# --- readers ---


def _bridge(pipe: Connection) -> None:
    keep_freed_memory()  # both as `kvsight bridge` does
    load_kernels()

    async def run() -> None:
        template = PublisherSettings.ignoring_environment(model="-", worker="-", block_size=1)
        bridge = BridgeSettings.ignoring_environment()
        async with Fleet(bridge, template, MemorySink(MemoryLog())) as fleet:
            for number, endpoint in enumerate(await asyncio.to_thread(pipe.recv)):
                await fleet.add(EngineSettings(endpoint=endpoint, worker=str(number), model="m", block_size=BLOCK_SIZE))
            while (goal := await asyncio.to_thread(pipe.recv)) is not None:
                while sum(each.counters.events for each in fleet.status()) < goal:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
                pipe.send("done")

    uvloop.run(run())


def through_bridge(engines: Engines, kind: Kind) -> float:
    """One run."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_bridge, args=(theirs,), daemon=True)
    process.start()

    def wait(part: int) -> None:
        ours.send(kind.num_events_before + part * kind.num_events)
        if not ours.poll(GIVE_UP_S):
            raise TimeoutError(f"not all events are there after {GIVE_UP_S} s")
        ours.recv()

    try:
        return engines.measured(kind, ours.send, wait)
    finally:
        ours.send(None)
        process.join()


def over_http(engines: Engines, kind: Kind, service: Service) -> float:
    """One run of an indexer with `POST /register`."""
    with running(service) as client:

        def register(endpoints: list[str]) -> None:
            for number, endpoint in enumerate(endpoints):
                body = {"instance_id": number, "endpoint": endpoint, "model_name": "m", "block_size": BLOCK_SIZE}
                posted(client, "/register", msgspec.json.encode(body))

        def wait(part: int) -> None:
            give_up = time.monotonic() + GIVE_UP_S
            for number, prompts in enumerate(engines.last_prompts[kind.name]):
                body = msgspec.json.encode({"model_name": "m", "token_ids": prompts[part]})
                while not _holds(client, body, str(number)):
                    if time.monotonic() > give_up:
                        raise TimeoutError(f"engine {number} is not there after {GIVE_UP_S} s")
                    time.sleep(_POLL_S)

        return engines.measured(kind, register, wait)


def _holds(client: HTTPConnection, body: bytes, instance: str) -> bool:
    answer = posted(client, "/query", body)
    held: int = answer.get("scores", {}).get(instance, {}).get("0", 0)
    return held == PROMPT_PAGES * BLOCK_SIZE


# --- figures ---


def run() -> list[Figure]:
    """Return all figures. Ratios are ratios of medians."""
    engines = Engines()
    readers: dict[str, Callable[[Kind], float]] = {
        "bridge": lambda kind: through_bridge(engines, kind),
        "/register": lambda kind: over_http(engines, kind, KVSIGHT),
    }
    if (peer := dynamo(_PEER_THREADS)) is not None:
        readers["peer"] = lambda kind: over_http(engines, kind, peer)
    try:
        return [each for kind in KINDS for each in _figures(kind, readers)]
    finally:
        engines.stop()


def _figures(kind: Kind, readers: dict[str, Callable[[Kind], float]]) -> Iterator[Figure]:
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(ROUNDS):
        for name, read in readers.items():
            seconds[name].append(read(kind))
    for name, each in seconds.items():
        yield figure(f"{kind.name}, {name}", "events/s", [kind.num_events / s for s in each])
        yield figure(f"{kind.name}, {name}", "pages/s", [kind.num_pages / s for s in each])
    for name in seconds.keys() - {"peer"} if "peer" in seconds else ():
        yield figure(f"{kind.name}, {name} : peer", "x", [median(seconds["peer"]) / median(seconds[name])], "> 1.5")


if __name__ == "__main__":
    main("bridge", run)
