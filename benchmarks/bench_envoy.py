"""The endpoint picker behind a real Envoy: `python -m benchmarks.bench_envoy [--json FILE]`

Latency: prompts of 64 pages at 500 requests a second, through an Envoy that asks the picker, and one that asks nobody.
They take turns. Reuse: conversations with shared beginnings on three simulated engines, whose prefill takes time,
against what one engine with all pages would reuse.
"""

import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop
from aiohttp import web

from benchmarks.peers.clients import paced_us
from benchmarks.report import Figure, figure, main, percentile
from kv_events.hashing import sequence_hashes
from tests.support.commands import RunningCommand
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.servers.envoy import Envoy
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import wait_until

ENGINES, BLOCK_SIZE, PAGES = 3, 16, 64
RATES, SECONDS, CONNECTIONS, ROUNDS = (100, 500), 3, 64, 5
GROUPS, TURNS, SHARED_PAGES, OWN_PAGES = 40, 12, 48, 8
AT_ONCE = 1, 8
POLICIES = "overlap-load", "lmetric"
PREFILL_S_PER_TOKEN = 1e-5


class _Engine:
    """Caches all pages, publishes the new ones, and says how many tokens it reused."""

    def __init__(self, events: ZmqEngine) -> None:
        self._events = events
        self._held: set[int] = set()
        self.reused = 0

    async def complete(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        tokens, wait_s = body["prompt"], body.get("prefill_s_per_token", 0.0)
        hashes = [int(each) for each in sequence_hashes(tokens, BLOCK_SIZE)]
        held = next((number for number, each in enumerate(hashes) if each not in self._held), len(hashes))
        if new := hashes[held:]:
            self._held.update(new)
            parent = hashes[held - 1] if held else None
            event = ["BlockStored", new, parent, tokens[held * BLOCK_SIZE :], BLOCK_SIZE, None, "GPU"]
            self._events.send(msgspec.msgpack.encode([time.time(), [event], 0]))
        if wait_s:
            await asyncio.sleep(wait_s * len(new) * BLOCK_SIZE)
        return web.json_response({"usage": {"prompt_tokens_details": {"cached_tokens": held * BLOCK_SIZE}}})


def _serve(pipe: Connection, ports: list[int], event_ports: list[int]) -> None:
    async def serve() -> None:
        for port, event_port in zip(ports, event_ports, strict=True):
            app = web.Application(client_max_size=2**24)
            app.router.add_post("/v1/completions", _Engine(ZmqEngine(port=event_port)).complete)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
        pipe.send(None)
        await asyncio.Event().wait()

    uvloop.run(serve())


class _Site:
    """Engines, a service that reads them, a picker, and two Envoys."""

    def __init__(self, stack: ExitStack, policy: str) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports, event_ports = ([free_port() for _ in range(ENGINES)] for _ in range(2))
        ours, theirs = multiprocessing.Pipe()
        arguments = (theirs, ports, event_ports)
        engines = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
        engines.start()
        stack.callback(engines.kill)
        ours.recv()
        self.service = stack.enter_context(ServiceProcess(folder, KVSIGHT_POLICY=policy))
        addresses = [f"127.0.0.1:{port}" for port in ports]
        for address, port in zip(addresses, event_ports, strict=True):
            body = {"instance_id": address, "endpoint": f"tcp://127.0.0.1:{port}", "model_name": "m"}
            self.service.post("/register", body | {"block_size": BLOCK_SIZE}).raise_for_status()
        self.service.wait_until_ready()
        picker_port = free_port()
        picker = stack.enter_context(
            RunningCommand("endpoint-picker", "--url", self.service.url, "--port", picker_port)
        )
        picker.wait_for("picks endpoints")
        self.plain = stack.enter_context(Envoy(folder, addresses, None))
        self.asking = stack.enter_context(Envoy(folder, addresses, picker_port))
        for address in addresses:  # every engine has published, so the service knows its model
            tokens = [hash(address) % 100_000] * BLOCK_SIZE
            httpx.post(f"http://{address}/v1/completions", json={"prompt": tokens}).raise_for_status()
        wait_until(self._is_picking, 60, "the picker to choose")

    def _is_picking(self) -> bool:
        httpx.post(f"{self.asking.url}/v1/completions", json={"model": "m", "prompt": [1] * BLOCK_SIZE})
        return len(self.service.get("/loads").json()[0]["loads"]) == ENGINES


def run() -> list[Figure]:
    """Return all figures."""
    figures: list[Figure] = []
    for policy in POLICIES:
        with ExitStack() as stack:
            site = _Site(stack, policy)
            figures += _reuse(f"picker, {policy}", site.asking, "≥ 0.95")
            if policy == POLICIES[0]:
                figures += _reuse("Envoy's round robin", site.plain, "")
                figures += [each for rate in RATES for each in _latency(site, rate)]
    return figures


def _latency(site: _Site, rate: int) -> Iterator[Figure]:
    prompts = [[number * 1000 + i for i in range(PAGES * BLOCK_SIZE)] for number in range(64)]
    bodies = [json.dumps({"model": "m", "prompt": prompt}).encode() for prompt in prompts]
    took: dict[str, list[list[float]]] = {"plain": [], "asking": []}
    for number in range(ROUNDS + 1):
        for name, envoy in (("plain", site.plain), ("asking", site.asking)):
            target = HTTPConnection("127.0.0.1", envoy.port)
            measured = paced_us(target, bodies, CONNECTIONS, SECONDS, rate, "/v1/completions")
            if number:  # the first round fills the caches
                took[name].append(measured)
    for percent, goal in ((50, "≤ 1500" if rate == RATES[-1] else ""), (99, "")):
        plain, asking = ([percentile(each, percent) for each in took[name]] for name in ("plain", "asking"))
        added = [more - less for more, less in zip(asking, plain, strict=True)]
        yield figure(f"{PAGES} pages, {rate}/s, p{percent}: added by the picker", "us", added, goal)
        yield figure(f"{PAGES} pages, {rate}/s, p{percent}: Envoy alone", "us", plain)
        yield figure(f"{PAGES} pages, {rate}/s, p{percent}: Envoy with the picker", "us", asking)


def _reuse(name: str, envoy: Envoy, goal: str) -> Iterator[Figure]:
    for at_once in AT_ONCE:
        shares = [asyncio.run(_share(envoy.url, at_once, random.randrange(2**30))) for _ in range(3)]
        yield figure(f"reused of what can be, {at_once} at once: {name}", "", shares, goal)


async def _share(url: str, at_once: int, seed: int) -> float:
    """Return reused tokens divided by those that one engine with all pages would reuse."""
    rng = random.Random(seed)
    shared = [_tokens(rng, SHARED_PAGES) for _ in range(GROUPS)]
    prompts = [group + _tokens(rng, OWN_PAGES) for group in shared for _ in range(TURNS)]
    rng.shuffle(prompts)
    waiting, reused = iter(prompts), 0
    async with httpx.AsyncClient(timeout=60) as client:

        async def send() -> None:
            nonlocal reused
            for prompt in waiting:
                body = {"model": "m", "prompt": prompt, "prefill_s_per_token": PREFILL_S_PER_TOKEN}
                answer: Any = (await client.post(f"{url}/v1/completions", json=body)).json()
                reused += answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        await asyncio.gather(*(send() for _ in range(at_once)))
    return reused / (GROUPS * (TURNS - 1) * SHARED_PAGES * BLOCK_SIZE)


def _tokens(rng: random.Random, pages: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(pages * BLOCK_SIZE)]


if __name__ == "__main__":
    main("the endpoint picker behind Envoy", run)
