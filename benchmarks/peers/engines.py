"""A process of simulated engines, each of which holds the same prompts. It publishes them over ZMQ to every service."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks.peers.services import GIVE_UP_S, posted

BLOCK_SIZE, PROMPTS, PAGES = 16, 4, 8192
_POLL_S = 0.05
_SEED = 1


def prompts() -> list[list[int]]:
    """Return the tokens of each prompt."""
    random = np.random.default_rng(_SEED)
    tokens: list[list[int]] = random.integers(0, 128_000, (PROMPTS, PAGES * BLOCK_SIZE)).tolist()
    return tokens


Registering = Callable[[HTTPConnection, int, str], object]
"""Makes a service read a worker. Parameters: the service, the worker's number, the address of its events."""


def register(service: HTTPConnection, worker: int, endpoint: str) -> None:
    """Make an indexer read a worker."""
    body = {"instance_id": worker, "endpoint": endpoint, "model_name": "m", "block_size": BLOCK_SIZE}
    posted(service, "/register", msgspec.json.encode(body))


def is_filled(service: HTTPConnection, num_workers: int) -> bool:
    """Return whether an indexer knows all pages."""
    body = msgspec.json.encode({"model_name": "m", "token_ids": prompts()[-1]})
    expected = {str(worker): {"0": PAGES * BLOCK_SIZE} for worker in range(num_workers)}
    return bool(posted(service, "/query", body).get("scores") == expected)


@contextmanager
def holding(
    services: Sequence[HTTPConnection],
    num_workers: int,
    add: Registering = register,
    is_done: Callable[[HTTPConnection, int], bool] = is_filled,
) -> Iterator[None]:
    """Fill services with the pages of `num_workers` engines, which run for the duration of the block."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, num_workers, len(services))
    process = multiprocessing.get_context("spawn").Process(target=_publish, args=arguments, daemon=True)
    process.start()
    theirs.close()  # so that the end of the process ends the wait for it
    try:
        for worker, port in enumerate(ours.recv()):
            for service in services:
                add(service, worker, f"tcp://127.0.0.1:{port}")
        for service in services:
            give_up = time.monotonic() + GIVE_UP_S
            while not is_done(service, num_workers):
                if time.monotonic() > give_up:
                    raise TimeoutError(f"the service at port {service.port} lacks pages after {GIVE_UP_S} s")
                time.sleep(_POLL_S)
        yield
    finally:
        process.kill()
        process.join()


def _publish(pipe: Connection, num_workers: int, num_services: int) -> None:
    sockets: list[zmq.Socket[bytes]] = [zmq.Context.instance().socket(zmq.XPUB) for _ in range(num_workers)]
    for each in sockets:
        each.setsockopt(zmq.SNDHWM, 0)
        each.setsockopt(zmq.XPUB_VERBOSE, 1)
    pipe.send([each.bind_to_random_port("tcp://127.0.0.1") for each in sockets])
    for each in sockets:
        for _ in range(num_services):
            each.recv()
    held = prompts()
    for worker, each in enumerate(sockets):
        for number, event in enumerate(_events(held, worker)):
            payload = msgspec.msgpack.encode([time.time(), [event], 0])
            each.send_multipart((b"", number.to_bytes(8, "big"), payload), copy=False)
    signal.pause()  # until the process is killed: a socket that closes would drop what is not sent yet


def _events(held: list[list[int]], worker: int) -> Iterator[list[Any]]:
    """Yield one event for each prompt: Dynamo with several threads drops events that overtake that of their parent."""
    for number, tokens in enumerate(held):
        first = ((worker * PROMPTS + number) << 24) + 1
        yield ["BlockStored", list(range(first, first + PAGES)), None, tokens, BLOCK_SIZE, None, "GPU"]
