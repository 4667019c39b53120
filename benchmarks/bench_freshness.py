"""From an engine's ZMQ message to the score of its blocks. `python -m benchmarks.bench_freshness [--json FILE]`

An engine, which is a process of its own, sends a message of vLLM's protocol every 20 ms: one event of 64 new blocks.
`kvsight serve` reads it, and a router asks `POST /query` for the newest event, every half millisecond, until the score
counts all its blocks. The time runs from before the engine's send until the router has the answer. First the machine is
quiet, then one busy process for each core competes with the three.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import count
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import zmq

from benchmarks.peers.services import KVSIGHT, posted, running
from benchmarks.report import Figure, figure, main, percentile

EVENT_BLOCKS, BLOCK_SIZE = 64, 16
EVENTS, WARM_UP = 1000, 50
_PERIOD_S, _QUERY_S = 0.02, 0.0005


def _send(pipe: Connection) -> None:
    """Bind, say where, wait for a subscriber, and send events at a steady rate, each with its time and its query."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    socket.recv()
    random, due = np.random.default_rng(1), time.perf_counter()
    for seq in count():
        tokens = random.integers(0, 128_000, EVENT_BLOCKS * BLOCK_SIZE).tolist()
        names = list(range(seq * EVENT_BLOCKS + 1, (seq + 1) * EVENT_BLOCKS + 1))
        event = ["BlockStored", names, None, tokens, BLOCK_SIZE, None, "GPU", None]
        query = msgspec.json.encode({"model_name": "m", "token_ids": tokens})
        sent_at = time.perf_counter()
        socket.send_multipart((b"", seq.to_bytes(8, "big"), msgspec.msgpack.encode([time.time(), [event], 0])))
        pipe.send((sent_at, query))
        due += _PERIOD_S
        time.sleep(max(0.0, due - time.perf_counter()))


@contextmanager
def engine(client: HTTPConnection) -> Iterator[Connection]:
    """Run an engine that the service reads for the duration of the block, which gets what it sends."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_send, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process ends the wait for it
    try:
        endpoint = f"tcp://127.0.0.1:{ours.recv()}"
        body = {"instance_id": 0, "endpoint": endpoint, "model_name": "m", "block_size": BLOCK_SIZE}
        posted(client, "/register", msgspec.json.encode(body))
        yield ours
    finally:
        process.kill()
        process.join()


@contextmanager
def busy_cores(num_processes: int) -> Iterator[None]:
    """Keep so many cores busy for the duration of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def ages(client: HTTPConnection, sent: Connection) -> Iterator[float]:
    """Yield the milliseconds from the engine's send until the score counts the event, for each newest event."""
    while True:
        sent_at, query = sent.recv()
        while sent.poll():
            sent_at, query = sent.recv()
        while _score(posted(client, "/query", query)) != EVENT_BLOCKS * BLOCK_SIZE:
            time.sleep(_QUERY_S)
        yield (time.perf_counter() - sent_at) * 1e3


def _score(answer: dict[str, dict[str, dict[str, int]]]) -> int:
    return answer.get("scores", {}).get("0", {}).get("0", 0)


def run() -> list[Figure]:
    """Return the figures of a thousand events on a quiet machine, and of as many on a busy one."""
    figures = []
    cores = os.cpu_count() or 1
    with running(KVSIGHT) as client, engine(client) as sent:
        for name, num_busy, goal in (("quiet", 0, "<= 5"), (f"{cores} busy processes", cores, "<= 20")):
            with busy_cores(num_busy):
                measured = [age for age, _ in zip(ages(client, sent), range(WARM_UP + EVENTS), strict=False)][WARM_UP:]
            figures.append(figure(f"from the engine's message to the score, {name}", "ms", measured))
            figures.append(figure("the same, 99th percentile", "ms", [percentile(measured, 99)], goal))
    return figures


if __name__ == "__main__":
    main("freshness", run)
