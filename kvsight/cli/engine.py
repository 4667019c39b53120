"""`kvsight engine`"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsight.cli.connection_flags import with_kafka_flags
from kvsight.cli.console import err, import_without_kernels, stop_signals
from kvsight.cli.logs import with_log_flags
from kvsight.extras import require_serve

if TYPE_CHECKING:
    from publisher import PublisherSettings


@with_log_flags
@with_kafka_flags
def engine(
    worker: Annotated[str, typer.Option(help="Name of the worker.", envvar="KVSIGHT_WORKER")],
    kafka: Annotated[str, typer.Option(help="Kafka bootstrap servers: HOST:PORT,...", envvar="KVSIGHT_KAFKA")],
    model: Annotated[str, typer.Option(help="Model that the worker serves.", envvar="KVSIGHT_MODEL")] = "demo-model",
    capacity_tokens: Annotated[int, typer.Option("--capacity", help="Tokens that the cache holds.")] = 2**20,
    block_size: Annotated[int, typer.Option(help="Tokens per page.", envvar="KVSIGHT_BLOCK_SIZE")] = 64,
    rate: Annotated[float, typer.Option(help="Requests per second.", min=0.01, max=1000)] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of the workload, one per engine.")] = 0,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve Prometheus metrics on this port.", envvar="KVSIGHT_METRICS_PORT", min=1, max=65_535),
    ] = None,
    *,
    connection: dict[str, Any],
) -> None:
    """Run one simulated worker that publishes to Kafka.

    It has a real radix cache and a generated workload, for trying out a deployment without GPUs. It also holds a part
    of the prompt that `kvsight demo-prompt` prints.

    Runs until Ctrl-C, then flushes and reports undelivered pages.
    """
    if metrics_port is not None:
        require_serve("kvsight engine --metrics-port")
    load_kernels = import_without_kernels("simulation", "publisher.own_blocks")
    from publisher import PublisherSettings

    settings = PublisherSettings.from_flags(
        worker=worker, kafka=kafka, **connection, model=model, block_size=block_size, metrics_port=metrics_port
    )
    load_kernels()
    asyncio.run(_serve(settings, capacity_tokens, rate, seed))


async def _serve(settings: PublisherSettings, capacity: int, rate: float, seed: int) -> None:
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
    for request in engine_requests(seed):
        worker.serve(request)
        try:
            await asyncio.wait_for(stop.wait(), 1 / rate)
        except TimeoutError:
            continue
        report = await publisher.aclose()
        err.print(f"stopped; {report.unflushed_pages} pages were not delivered")
        return
