"""`kvsight demo`"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, cycle
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvsight.cli.shared.answers import Asked, answer_lines
from kvsight.cli.shared.console import UsageError, err, out, print_lines
from kvsight.cli.shared.flags import BROKER, KAFKA, LOG_LINES, METRICS_PORT, Flag, with_flags
from kvsight.cli.shared.process import load_kernels, stop_signals
from kvsight.cli.shared.streams import rows_of
from kvsight.cli.simulate import policy_progress, report_lines
from kvsight.extras import require

if TYPE_CHECKING:
    from api.decisions.window import DecisionWindow
    from api.settings import ApiSettings
    from publisher import PublisherSettings
    from simulation import SimulationSettings
    from simulation.live import LiveFleet
    from simulation.policy_run import PolicyRun
    from simulation.workload import Request

_NUM_REQUESTS = 1500
_WARM_REQUESTS = 300
_WORKERS = 4
_CAPACITY_TOKENS = 2**18
_TIERED_CAPACITY_TOKENS = 2**14  # so small that the warm-up alone fills device and host
_TIERED_HOST_RATIO = 1.5
_PAGE_SIZE = 16
_SHOWN_RATE = 5.0  # which people can follow
_FLAGS = {
    "kafka": BROKER,
    "model": Flag(str, "Model of the worker and of the prompt.", True, default="demo-model"),
    "block_size": Flag(int, "Tokens per page.", True, default=64),
    **METRICS_PORT,
}
"""Of `PublisherSettings`."""


@with_flags(_FLAGS, KAFKA, LOG_LINES)
def demo(
    port: Annotated[
        int | None, typer.Option(help="Port of the API. Default: 8000, or a free one.", envvar="KVSIGHT_PORT")
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Requests that the policies serve.", min=_WARM_REQUESTS + 1)
    ] = _NUM_REQUESTS,
    cache: Annotated[str, typer.Option(help="radix, hiradix, mamba or himamba.")] = "radix",
    should_exit: Annotated[bool, typer.Option("--exit", help="Exit after the first answer.")] = False,
    should_open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    prompt: Annotated[bool, typer.Option("--prompt", help="Only print a query about --engine's workers.")] = False,
    worker: Annotated[str | None, typer.Option("--engine", help="Only run one worker of this name.")] = None,
    capacity_tokens: Annotated[int, typer.Option("--capacity", help="Tokens that its cache holds.")] = 2**20,
    rate: Annotated[float, typer.Option(help="Its requests per second.", min=0.01, max=1000)] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of its workload, one per engine.")] = 0,
    *,
    flags: dict[str, Any],
) -> None:
    """Run simulated engines, the index and the API together.

    Compares routing policies on a generated workload. hiradix and himamba have a host and a disk tier. Then runs a live
    fleet, serves the page that shows it, and asks the API which worker holds a prompt. Needs no Kafka, Redis, Docker or
    GPU. Of the KVSIGHT_ variables only the port and the hash seed are used. Stop with Ctrl-C.

    With --engine, runs one worker that publishes to Kafka, for trying out a deployment without GPUs. It has a real
    radix cache and a generated workload. --capacity and all options below it are for this worker. After Ctrl-C it
    flushes, and reports undelivered pages.

    --prompt prints the body of POST /query for a prompt of which each such worker holds a part. How much depends on
    its --seed: 0 holds all 2048 tokens, 1 a half, 2 a quarter, 3 an eighth.

    Example: kvsight demo --prompt | kvsight query -
    """
    from publisher import PublisherSettings

    if prompt:
        from simulation.workload import demo_prompt

        checked = {name: flags[name] for name in ("model", "block_size")}
        PublisherSettings.ignoring_environment(worker=worker or "any", **checked)
        typer.echo(msgspec.json.encode({"model_name": flags["model"], "token_ids": demo_prompt().tolist()}))
        return
    if worker is not None:
        if flags["kafka"] is None:
            raise UsageError("--engine needs --kafka HOST:PORT")
        own = PublisherSettings.from_flags(worker=worker, **flags)
        load_kernels()
        asyncio.run(_run_engine(own, capacity_tokens, rate, seed))
        return
    require("serve", "kvsight demo")
    from api.server import CannotListenError, listen
    from api.settings import ApiSettings

    fleet_settings = _fleet_settings(cache)
    settings = ApiSettings.ignoring_environment(**({} if port is None else {"port": port}))
    try:
        listening = listen(settings)
    except CannotListenError as error:
        if port is not None:
            raise
        listening = listen(ApiSettings.ignoring_environment(port=0))
        err.print(f"{error}: the demo takes port {listening.getsockname()[1]}")
    with listening as bound:
        from simulation import POLICIES, WorkloadSettings, generate, simulate

        load_kernels()
        workload = list(generate(WorkloadSettings(num_requests=requests, seed=0)))
        with policy_progress() as progress:
            reports = simulate(workload, fleet_settings, list(POLICIES), progress)
        print_lines(report_lines(reports))
        asyncio.run(
            _run_live(workload, settings, bound, fleet_settings, should_exit=should_exit, should_open=should_open)
        )


async def _run_engine(settings: PublisherSettings, capacity: int, rate: float, seed: int) -> None:
    """Run one simulated worker that publishes to Kafka, until SIGINT or SIGTERM. Raises KvsightError."""
    from publisher import EventPublisher
    from publisher.sinks.kafka import KafkaSink
    from simulation import SimulatedWorker, SimulationSettings, create_cache
    from simulation.workload import engine_requests

    stop = stop_signals()
    publisher = EventPublisher(settings, KafkaSink(settings))
    cache = create_cache(SimulationSettings(capacity_tokens=capacity, page_size=settings.block_size))
    worker = SimulatedWorker(publisher, cache)
    await publisher.start()
    if settings.metrics_port is not None:
        from publisher.metrics import PublisherMetrics, serve_metrics

        metrics = PublisherMetrics(lambda: [publisher])
        serve_metrics(settings.metrics_port, metrics, lambda: publisher.stats().obstacle)
    err.print(f"{settings.stream.key} serves {rate:g} requests per second; Ctrl-C stops")
    await _serve_at(rate, worker.serve, engine_requests(seed), stop)
    report = await publisher.aclose()
    err.print(f"stopped; pages not delivered: {report.unflushed_pages}")


def _fleet_settings(cache: str) -> SimulationSettings:
    from simulation import SimulationSettings

    settings = SimulationSettings(workers=_WORKERS, capacity_tokens=_CAPACITY_TOKENS, page_size=_PAGE_SIZE, cache=cache)
    if settings.has_tiers:
        return replace(settings, capacity_tokens=_TIERED_CAPACITY_TOKENS, host_ratio=_TIERED_HOST_RATIO)
    return settings


async def _run_live(
    workload: Sequence[Request],
    settings: ApiSettings,
    bound: socket.socket,
    fleet_settings: SimulationSettings,
    *,
    should_exit: bool,
    should_open: bool,
) -> None:
    """Run the same fleet with the real API: publishers, a log in memory, the consumer, HTTP."""
    from api.app import create_app
    from api.server import running_server
    from api.service import LiveService
    from indexer.assembly import create_consumer
    from indexer.settings import IndexerSettings
    from kv_events.log.memory import MemoryLog
    from selection.policies import DEFAULT_POLICY
    from simulation.caches import capacity_pages
    from simulation.live import memory_transport, publishing_fleet

    stop = stop_signals()
    log = MemoryLog()
    consumer = create_consumer(IndexerSettings.ignoring_environment(), log)
    service, room = LiveService(consumer, settings), capacity_pages(fleet_settings)
    service.capacity = lambda _stream, _block_size: room
    async with (
        running_server(create_app(service), settings, bound) as url,
        publishing_fleet(fleet_settings, DEFAULT_POLICY, memory_transport(log), consumer) as fleet,
    ):
        serve = partial(_serve, fleet.run, service.decision_window, count())
        shown = await _warm_up(fleet, serve, workload, num_tiers=3 if fleet_settings.has_tiers else 1)
        print_lines([f"Open {url} to see the fleet while it runs."])
        await _show_answer(url, fleet_settings.model_of(DEFAULT_POLICY), shown)
        print_lines([f"{url}/docs describes the API, and {url}/metrics has its metrics."])
        if not should_exit:
            err.print("Ctrl-C stops the demo")
            # browsers for terminals would take this one
            if should_open and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                webbrowser.open(url)
            await _serve_at(_SHOWN_RATE, serve, cycle(workload[_WARM_REQUESTS:]), stop)


def _serve(run: PolicyRun, funnel: DecisionWindow, numbers: Iterator[int], request: Request) -> None:
    """Serve a request, and report what was chosen and reused, as routers do."""
    from kv_events.decisions import VERSION, Outcome

    chosen, now, request_id = run.step(request), time.time(), f"demo-{next(numbers)}"
    funnel.take(run.router.decision(request, chosen, request_id, now))
    funnel.take(Outcome(VERSION, request_id, now, run.found_tokens))


async def _warm_up(
    fleet: LiveFleet, serve: Callable[[Request], None], workload: Sequence[Request], num_tiers: int
) -> Request:
    """Serve requests until one prompt is spread over `num_tiers` tiers. Returns the prompt on the most tiers."""
    shown = workload[0]
    for number, request in enumerate(workload, 1):
        serve(request)
        await asyncio.sleep(0)
        if number >= _WARM_REQUESTS:
            await fleet.wait_until_synced()
            shown = max(workload[:number][::-1], key=fleet.run.router.num_tiers)
            if fleet.run.router.num_tiers(shown) >= num_tiers:
                break
    return shown


async def _serve_at(
    rate: float, serve: Callable[[Request], object], requests: Iterable[Request], stop: asyncio.Event
) -> None:
    for request in requests:
        serve(request)
        try:
            await asyncio.wait_for(stop.wait(), 1 / rate)
        except TimeoutError:
            continue
        return


async def _show_answer(url: str, model: str, request: Request) -> None:
    from kvsight.client import AsyncClient

    body = {"model_name": model, "token_ids": request.token_ids.tolist()}
    async with AsyncClient(url) as client:
        answer, workers = await client.query_raw(body), await client.workers(model)
    print_lines([f"POST {url}/query"])
    print_lines(answer_lines(answer, Asked.of(body), rows_of(workers), out.width))
