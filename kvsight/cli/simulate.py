"""`kvsight simulate`"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsight.cli.logs.reading import check_new_log
from kvsight.cli.shared.console import HtmlReport, at_most_one, check_html, out, print_result, progress_bar, write_html
from kvsight.cli.shared.flags import KAFKA, AsJson, with_flags
from kvsight.cli.shared.process import load_kernels, run_until_interrupted
from kvsight.cli.shared.tables import Column, table_lines

if TYPE_CHECKING:
    from simulation import Latency, PolicyReport

_NUM_REQUESTS = 2000
_SUBAGENT_SHARE = 0.1


@with_flags(KAFKA)
def simulate(
    *,
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace: .jsonl or .jsonl.gz.")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests of a generated workload.", min=1, show_default=str(_NUM_REQUESTS))
    ] = None,
    agents: Annotated[bool, typer.Option("--agents", help="Generate only agents, with sub-agents.")] = False,
    workers: Annotated[int, typer.Option(help="Workers in the fleet.")] = 8,
    capacity_tokens: Annotated[int, typer.Option("--capacity", help="Tokens that each cache holds on the device.")] = 2
    ** 20,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 64,
    cache: Annotated[str, typer.Option(help="radix, hiradix, mamba or himamba.")] = "radix",
    host_ratio: Annotated[float, typer.Option(help="Host tokens per device token, with tiers.")] = 2.0,
    disk_ratio: Annotated[float, typer.Option(help="Disk tokens per device token, with tiers.")] = 8.0,
    groups: Annotated[bool, typer.Option("--groups", help="Also publish recurrent states.")] = False,
    policy: Annotated[list[str] | None, typer.Option(help="A policy to compare. Repeatable.")] = None,
    speed: Annotated[float, typer.Option(help="Let requests arrive so many times as fast.")] = 1.0,
    routers: Annotated[int, typer.Option(help="Replicas of the router.")] = 1,
    booking_delay_s: Annotated[
        float, typer.Option("--booking-delay", help="Seconds until others know a booking, or inf.")
    ] = 0.02,
    ttft_slo_s: Annotated[float, typer.Option("--ttft-slo", help="Seconds to the first token that are good.")] = 2.0,
    itl_slo_s: Annotated[float, typer.Option("--itl-slo", help="Seconds between tokens that are good.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    kafka: Annotated[str | None, typer.Option(help="Send events through Kafka: HOST:PORT.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write the events to PATH/POLICY.")] = None,
    html: HtmlReport = None,
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Compare routing policies on a fleet of simulated workers.

    The caches and the events are real, the engines need as long as one with 8 billion parameters on an H100. hiradix
    and himamba have a host and a disk tier, mamba and himamba recurrent states. Without --trace, the workload is
    generated. With --kafka, engines answer without delay.

    Shows for each policy the share of prompt tokens found in the caches, the load of the workers, and the wrong pages:
    those that were in a cache or in the router's view of it at the end, but not in both. Their number must be 0. With
    --groups, wrong answers about the last prompts count, too. Then shows the times to the first token (TTFT) and
    between two tokens (ITL), and the requests per second that were good: that met --ttft-slo and --itl-slo.

    Example: kvsight simulate --trace conversation_trace.jsonl.gz --workers 8
    """
    at_most_one({"--trace": trace, "--requests": requests})
    at_most_one({"--kafka": kafka, "--record": record})
    at_most_one({"--trace": trace, "--agents": agents or None})
    check_html(html, "kvsight simulate --html")
    from kv_events.kafka.connection import KafkaConnection
    from kv_events.kafka.settings import KafkaSettings

    broker = None if kafka is None else KafkaSettings.from_flags(kafka=kafka, **flags)
    if broker is not None:
        run_until_interrupted(KafkaConnection(broker).check)  # before a minute of compiling
    from simulation import POLICIES, MooncakeTrace, SimulationSettings, WorkloadSettings, create_policy, generate
    from simulation import simulate as run

    settings = SimulationSettings(
        workers=workers,
        capacity_tokens=capacity_tokens,
        page_size=page_size,
        cache=cache,
        host_ratio=host_ratio,
        disk_ratio=disk_ratio,
        groups=groups,
        speed=speed,
        routers=routers,
        booking_delay_s=booking_delay_s,
        ttft_slo_s=ttft_slo_s,
        itl_slo_s=itl_slo_s,
        seed=seed,
        kafka=broker,
        event_log_dir=record,
    )
    policies = list(dict.fromkeys(policy or POLICIES))
    if record is not None:
        check_new_log(record)
    for name in policies:
        create_policy(name, seed)
        if record is not None:
            check_new_log(record / name)
    generated = WorkloadSettings(num_requests=requests or _NUM_REQUESTS, seed=seed)
    if agents:
        generated = replace(generated, agent_share=1.0, subagent_share=_SUBAGENT_SHARE)
    workload = generate(generated) if trace is None else MooncakeTrace(trace)
    load_kernels()
    with policy_progress() as progress:
        reports = run(workload, settings, policies, progress)
    if html is not None:
        from simulation.html_page import write_simulation_page

        source = f"{trace}" if trace is not None else f"a generated workload, seed {seed}"
        write_html(html, lambda path: write_simulation_page(path, reports, settings, source))
    print_result([report.to_dict() for report in reports], report_lines(reports), as_json=as_json)


def report_lines(reports: Sequence[PolicyReport]) -> Iterator[str]:
    """Yield tables with a row for each policy. Wrong pages include wrong answers about groups."""
    requests = [[load.requests for load in report.workers] for report in reports]
    computed = [[load.computed_tokens / 1e6 for load in report.workers] for report in reports]
    columns = [
        Column("\npolicy", [report.policy for report in reports]),
        Column("tokens\nin cache", [f"{report.found_share:.1%}" for report in reports], is_number=True),
        Column("requests/worker\nmin/mean/max", [_spread(each, ".0f") for each in requests], is_number=True),
        Column("Mtokens computed\nmin/mean/max", [_spread(each, ".1f") for each in computed], is_number=True),
        Column("queries\nasked", [report.queries for report in reports]),
        Column("wrong\npages", [report.divergent_pages + report.divergent_answers for report in reports]),
        Column("run\ntime", [f"{report.seconds:.1f} s" for report in reports], is_number=True),
    ]
    yield from table_lines(columns, out.width)
    times = [(report.policy, report.latency) for report in reports if report.latency is not None]
    if times:
        yield ""
        yield from table_lines(_time_columns(times), out.width)


def _time_columns(times: Sequence[tuple[str, Latency]]) -> Iterator[Column]:
    def pairs(title: str, scale: float, form: str, names: tuple[str, ...]) -> Column:
        values = [[getattr(each, name) * scale for name in names] for _, each in times]
        texts = [["-" if math.isnan(value) else format(value, form) for value in each] for each in values]
        return Column(title, ["/".join(each) for each in texts], is_number=True)

    yield Column("\npolicy", [name for name, _ in times])
    yield pairs("TTFT ms\np50/p99", 1e3, ",.0f", ("ttft_p50_s", "ttft_p99_s"))
    yield pairs("ITL ms\np50/p99", 1e3, ".1f", ("itl_p50_s", "itl_p99_s"))
    yield pairs("requests/s\ngood/all", 1, ".2f", ("goodput_per_s", "requests_per_s"))


def _spread(values: Sequence[float], form: str) -> str:
    return "/".join(format(value, form) for value in (min(values), sum(values) / len(values), max(values)))


@contextmanager
def policy_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for each policy."""
    with progress_bar() as bar:
        tasks = {}

        def show(policy: str, done: int, total: int) -> None:
            if policy not in tasks:
                tasks[policy] = bar.add_task(policy, total=total)
            bar.update(tasks[policy], completed=done)

        yield show
