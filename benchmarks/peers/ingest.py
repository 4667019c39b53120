"""Ingest of both services, one event a message: from the first byte until the last block is visible to a query.

Eight engines send as fast as a service receives them. Each service is started again for each measurement and first
receives a few prompts that are not timed.
"""

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.peers.services import GIVE_UP_S, KVSIGHT, Service, cpu_seconds, dynamo, posted, running
from benchmarks.peers.zmtp import Publisher, framed
from benchmarks.report import Figure, figure

WORKERS, BLOCK_SIZE, PROMPT_PAGES = 8, 16, 64
ROUNDS = 5
_PEER_THREADS = 2
WARM_UP_PROMPTS = 16
_POLL_S = 0.02
_GOAL = "≥ 1.5"


class Kind(NamedTuple):
    """One kind of traffic."""

    blocks: int
    """Blocks of an event. Each message has one event."""
    encoding: str
    """Of events: `array` or `map`."""
    parts: tuple[int, ...]
    """Prompts of each engine that are sent at a time. The last part is timed."""
    is_shared: bool = False
    """Whether all engines hold the same prompts."""

    @property
    def name(self) -> str:
        """As in the table."""
        return f"ingest, events of {self.blocks} blocks, {self.encoding}"


KINDS = [
    Kind(blocks, encoding, (WARM_UP_PROMPTS, prompts))
    for blocks, prompts in ((1, 512), (8, 1536), (64, 3072))
    for encoding in ("array", "map")
]


class Cost(NamedTuple):
    """What the timed blocks cost a service."""

    seconds: float
    cpu_seconds: float


def run() -> Iterator[Figure]:
    """Yield all figures, ratios first. Services take turns. CPU time depends less on other load than the rate does."""
    peer = dynamo(_PEER_THREADS)
    if peer is None:
        return
    for kind in KINDS:
        with engines(kind) as (pipe, last):
            costs: list[list[Cost]] = [[], []]
            for _ in range(ROUNDS):
                for side, service in zip(costs, (KVSIGHT, peer), strict=True):
                    side.append(_cost(service, pipe, last))
        blocks = WORKERS * kind.parts[-1] * PROMPT_PAGES
        rates = [[blocks / each.seconds for each in side] for side in costs]
        yield figure(f"{kind.name}: kvsight : Dynamo", "x", [median(rates[0]) / median(rates[1])], _GOAL)
        yield figure(f"{kind.name}: kvsight", "blocks/s", rates[0])
        yield figure(f"{kind.name}: Dynamo", "blocks/s", rates[1])
        times = [[each.cpu_seconds / blocks * 1e9 for each in side] for side in costs]
        yield figure(f"{kind.name}, CPU: Dynamo : kvsight", "x", [median(times[1]) / median(times[0])])
        yield figure(f"{kind.name}, CPU: kvsight", "ns/block", times[0])
        yield figure(f"{kind.name}, CPU: Dynamo", "ns/block", times[1])


def _cost(service: Service, pipe: Connection, last: list[list[bytes]]) -> Cost:
    """Return the cost of one measurement. last: the query for the last prompt of each engine, by part."""
    with running(service) as client:
        marks = [(seconds, cpu_seconds(client)) for seconds in sent(client, pipe, last)]
    return Cost(marks[-1][0], marks[-1][1] - marks[-2][1])


def sent(client: HTTPConnection, pipe: Connection, last: list[list[bytes]]) -> Iterator[float]:
    """Register the engines, and yield the seconds after each part that is visible."""
    pipe.send("accept")
    for worker, port in enumerate(pipe.recv()):
        endpoint = f"tcp://127.0.0.1:{port}"
        body = {"instance_id": worker, "endpoint": endpoint, "model_name": "m", "block_size": BLOCK_SIZE}
        posted(client, "/register", msgspec.json.encode(body))
    pipe.recv()
    for queries in last:
        began = time.perf_counter()
        pipe.send("go")
        _wait(client, queries)
        yield time.perf_counter() - began
    pipe.send("end")


def _wait(client: HTTPConnection, queries: list[bytes]) -> None:
    """Return as soon as each query finds its engine's whole prompt."""
    give_up = time.monotonic() + GIVE_UP_S
    for worker, body in enumerate(queries):
        while _held(posted(client, "/query", body), worker) != PROMPT_PAGES * BLOCK_SIZE:
            if time.monotonic() > give_up:
                raise TimeoutError(f"the service at port {client.port} does not hold all blocks after {GIVE_UP_S} s")
            time.sleep(_POLL_S)


def _held(answer: Any, worker: int) -> int:
    held: int = answer.get("scores", {}).get(str(worker), {}).get("0", 0)
    return held


# --- the engines' process ---


@contextmanager
def engines(kind: Kind) -> Iterator[tuple[Connection, list[list[bytes]]]]:
    """Run the engines' process for the duration of the block, which gets a pipe to it and the last queries."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, kind), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process ends the wait for it
    try:
        yield ours, ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, kind: Kind) -> None:
    """Prepare the traffic, then send it to one subscriber after the other."""
    traffic = [_traffic(kind, worker) for worker in range(WORKERS)]
    pipe.send([[each.queries[part] for each in traffic] for part in range(len(kind.parts))])
    with ThreadPoolExecutor(WORKERS) as threads:
        while True:
            pipe.recv()
            publishers = [Publisher() for _ in range(WORKERS)]
            pipe.send([each.port for each in publishers])
            list(threads.map(Publisher.accept, publishers))
            pipe.send("ready")
            for part in range(len(kind.parts)):
                pipe.recv()
                list(threads.map(Publisher.send, publishers, [each.wires[part] for each in traffic]))
            pipe.recv()
            for publisher in publishers:
                publisher.close()


class _Traffic(NamedTuple):
    """What one engine sends, by part."""

    wires: list[bytes]
    queries: list[bytes]
    """For the last prompt."""


def _traffic(kind: Kind, worker: int) -> _Traffic:
    random = np.random.default_rng(0 if kind.is_shared else worker)
    wires, queries = [], []
    seq = prompt = 0
    for num_prompts in kind.parts:
        messages = []
        for _ in range(num_prompts):
            tokens = random.integers(0, 128_000, PROMPT_PAGES * BLOCK_SIZE).tolist()
            first = ((worker + 1) << 40) + prompt * PROMPT_PAGES
            for event in _events(kind, first, tokens):
                payload = msgspec.msgpack.encode([time.time(), [event], 0])
                messages.append((b"", seq.to_bytes(8, "big"), payload))
                seq += 1
            prompt += 1
        wires.append(framed(messages))
        queries.append(msgspec.json.encode({"model_name": "m", "token_ids": tokens}))
    return _Traffic(wires, queries)


def _events(kind: Kind, first: int, tokens: list[int]) -> Iterator[Any]:
    """Yield the events of one prompt, whose block hashes count from `first`."""
    for page in range(0, PROMPT_PAGES, kind.blocks):
        fields = {
            "block_hashes": list(range(first + page, first + page + kind.blocks)),
            "parent_block_hash": first + page - 1 if page else None,
            "token_ids": tokens[page * BLOCK_SIZE : (page + kind.blocks) * BLOCK_SIZE],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
        }
        yield {"type": "BlockStored", **fields} if kind.encoding == "map" else ["BlockStored", *fields.values()]
