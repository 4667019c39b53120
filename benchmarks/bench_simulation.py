"""Routing policies on a real trace, side by side with Dynamo's mocker replay, and over several replicas of the router.

`python -m benchmarks.bench_simulation [--json FILE] [--html FILE]`. 12,031 requests, 8 workers of 2**20 tokens (16,384
pages of 64). Events are applied to the index directly. All figures but the run times repeat themselves.
`MOONCAKE_TRACE` names the trace.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bokeh.layouts import column
from bokeh.models import LayoutDOM, Range1d
from bokeh.models.widgets import Div
from bokeh.plotting import save
from rich.console import Console
from rich.table import Table

from analysis.html.plots import GREY, RED, WORKER_COLOURS, Axis, Curve, lines
from benchmarks.peers.services import dynamo_folder
from benchmarks.report import Figure, as_json, figure, show
from simulation import (
    POLICIES,
    EngineSettings,
    MooncakeTrace,
    PolicyReport,
    Request,
    SimulationSettings,
    WorkloadSettings,
    generate,
    simulate,
)

_SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
TRACE = Path(os.environ.get("MOONCAKE_TRACE") or _SHARED)
LOADS = (1.0, 2.0, 4.0)
REPLICAS = (1, 2, 4, 8)
NUM_BESIDE, NUM_REPLICATED = 3000, 1000
"""Requests from the beginning of a workload, for the comparison with Dynamo and for the replicas."""
_FOUND_GOALS = {"overlap-load": "about 20", "lmetric": ">= 20", "round-robin": "about 8"}
_TICK_S = 3.0  # timestamps of the trace

PEER_SPEED = EngineSettings(attention_s=0.0, token_s=1.8e-5, decode_s=0.00643, context_s=4.17e-8)
"""Fitted to Dynamo's mock engine, whose prompt tokens attend only to their own chunk, and whose time of a decode step
grows less the more KV is in use. Within 9% for chunks of 2,000 to 8,192 tokens, and within 12% for decode with up to
40% of the KV in use."""


class Row(NamedTuple):
    """One router at one load. Hits and good requests in percent, times in milliseconds."""

    load: float
    """Factor by which requests arrive faster than in the trace."""
    router: str
    hit: float
    """Prompt tokens found in cache."""
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    good: float
    """Requests that met both objectives."""


def row_of(report: PolicyReport, load: float, router: str) -> Row:
    """Return the row of one run."""
    times = report.latency
    assert times is not None, "engines needed time"
    return Row(
        load,
        router,
        100 * report.found_share,
        1000 * times.ttft_p50_s,
        1000 * times.ttft_p99_s,
        1000 * times.itl_p50_s,
        1000 * times.itl_p99_s,
        100 * times.goodput_per_s / times.requests_per_s,
    )


def side_by_side(loads: Sequence[float] = LOADS) -> list[Row]:
    """Return our policies and Dynamo's router on the same trace, with engines of the same speed."""
    settings = SimulationSettings(engine=PEER_SPEED)
    rows = list(dynamo_rows(settings, loads))
    requests = list(islice(MooncakeTrace(TRACE), NUM_BESIDE))
    for load in loads:
        reports = simulate(requests, replace(settings, speed=load), POLICIES[1:])
        rows += [row_of(report, load, report.policy) for report in reports]
    return sorted(rows, key=lambda row: row.load)


def dynamo_rows(settings: SimulationSettings, loads: Sequence[float]) -> Iterable[Row]:
    """Yield the rows of Dynamo's replay; none if it cannot be installed."""
    folder = dynamo_folder()
    if folder is None:
        return
    arguments = [TRACE, NUM_BESIDE, settings.workers, settings.ttft_slo_s, settings.itl_slo_s, *loads]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.replay", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(folder), "DYN_LOG": "error"},
        check=True,
        stdout=subprocess.PIPE,
    )
    for each in json.loads(done.stdout):
        yield Row(**each)


def replicas() -> list[Row]:
    """Return rows with the number of replicas as load: bookings that arrive after 20 ms, and none."""
    agents = WorkloadSettings(num_requests=NUM_REPLICATED, agent_share=1.0, subagent_share=0.1)
    workloads = {
        "agents": (generate(agents), 4.0),
        "trace": (spread(list(islice(MooncakeTrace(TRACE), NUM_REPLICATED))), 3.0),
    }
    rows = []
    for name, (requests, speed) in workloads.items():
        for policy in POLICIES[2:]:
            for delay_s in (0.02, math.inf):
                for routers in REPLICAS:
                    settings = SimulationSettings(speed=speed, routers=routers, booking_delay_s=delay_s)
                    (report,) = simulate(requests, settings, [policy])
                    rows.append(row_of(report, routers, f"{name}, {policy}, {'own' if math.isinf(delay_s) else 'all'}"))
    return rows


def spread(requests: list[Request]) -> list[Request]:
    """Spread requests over the three seconds that they share a timestamp for."""
    arrivals = np.array([each.arrival_s for each in requests])
    _, firsts, places, counts = np.unique(arrivals, return_index=True, return_inverse=True, return_counts=True)
    offsets = (np.arange(len(requests)) - firsts[places]) / counts[places] * _TICK_S
    return [each._replace(arrival_s=float(at)) for each, at in zip(requests, arrivals + offsets, strict=True)]


def figures_of(report: PolicyReport) -> list[Figure]:
    """Return the figures of one policy."""
    name = report.policy
    requests = [float(load.requests) for load in report.workers]
    row = row_of(report, 1.0, name)
    return [
        figure(f"{name}: prompt tokens found in cache", "%", [row.hit], _FOUND_GOALS.get(name, "")),
        figure(f"{name}: requests a worker", "", requests),
        figure(f"{name}: most requests over mean", "", [report.imbalance]),
        figure(f"{name}: time to the first token, p50", "ms", [row.ttft_p50]),
        figure(f"{name}: time to the first token, p99", "ms", [row.ttft_p99]),
        figure(f"{name}: time between tokens, p99", "ms", [row.itl_p99]),
        figure(f"{name}: divergence of views and caches", "pages", [report.divergent_pages], "0"),
        figure(f"{name}: run time", "s", [report.seconds], "<= 60"),
    ]


def run() -> list[Figure]:
    """Return the figures of all policies. Raises InvalidValueError without a trace."""
    return [
        each for report in simulate(MooncakeTrace(TRACE), SimulationSettings(), POLICIES) for each in figures_of(report)
    ]


def show_rows(title: str, first: str, rows: list[Row]) -> None:
    """Print a table. first: title of the first column."""
    table = Table(title=title)
    for name in (first, "router", "hit %", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "good %"):
        table.add_column(name, justify="left" if name == "router" else "right")
    for row in rows:
        table.add_row(f"{row.load:g}", row.router, *(f"{value:,.1f}" for value in row[2:]))
    Console(width=120).print(table)


def save_plots(path: Path, tables: dict[str, list[Row]]) -> None:
    """Write hits and times to the first token of each table as curves, as one HTML file."""
    plots: list[LayoutDOM] = []
    for name, rows in tables.items():
        at = np.array(sorted({row.load for row in rows}))
        axis = Axis(at, Range1d(at[0], at[-1]), name, is_calendar=False)
        for title, field in (("Hit rate, %", "hit"), ("TTFT p99, ms", "ttft_p99")):
            by_router: dict[str, list[float]] = {}
            for row in rows:
                by_router.setdefault(row.router, []).append(getattr(row, field))
            pairs = zip(by_router.items(), (*WORKER_COLOURS, RED, GREY), strict=False)
            curves = [Curve(router, np.array(values), colour) for (router, values), colour in pairs]
            names = "".join(f"<span style='color: {each.colour}'>&#9632; {each.name}</span> " for each in curves)
            plots += [Div(text=f"<b>{title}</b> {names}"), lines(title, "", title, axis, curves).model]
    save(column(*plots, sizing_mode="stretch_width"), filename=path, title="Routing policies", resources="inline")


def main() -> None:
    """Run everything: minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--html", type=Path, help="also write plots to this file")
    arguments = parser.parse_args()
    figures = run()
    show("simulation of a trace", figures)
    tables = {"times the load of the trace": side_by_side(), "replicas of the router": replicas()}
    for name, rows in tables.items():
        show_rows(name, name.split()[0], rows)
    if arguments.json is not None:
        found = as_json({"simulation": figures}) | {
            name: [row._asdict() for row in rows] for name, rows in tables.items()
        }
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.html is not None:
        save_plots(arguments.html, tables)


if __name__ == "__main__":
    main()
