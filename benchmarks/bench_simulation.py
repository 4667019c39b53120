"""The Mooncake conversation trace under every policy. `python -m benchmarks.bench_simulation [--json FILE]`

12,031 requests, 8 workers of 2**20 tokens (16,384 pages of 64). Events are applied to the index directly. Hit rates and
divergence are deterministic; times are those of one run. `MOONCAKE_TRACE` names the trace.
"""

import os
from pathlib import Path

from benchmarks.report import Figure, figure, main
from simulation import POLICIES, MooncakeTrace, PolicyReport, SimulationSettings, simulate

_SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
_FOUND_GOALS = {"kv-aware": ">= 20", "round-robin": "about 8"}


def figures_of(report: PolicyReport) -> list[Figure]:
    """Return the figures of one policy."""
    name = report.policy
    requests = [float(load.requests) for load in report.workers]
    return [
        figure(f"{name}: prompt tokens found in cache", "%", [100 * report.found_share], _FOUND_GOALS.get(name, "")),
        figure(f"{name}: requests a worker", "", requests),
        figure(f"{name}: most requests over mean", "", [report.imbalance]),
        figure(f"{name}: divergence of views and caches", "pages", [report.divergent_pages], "0"),
        figure(f"{name}: time", "s", [report.seconds], "<= 60"),
    ]


def run() -> list[Figure]:
    """Return all figures. Raises InvalidValueError without a trace."""
    trace = MooncakeTrace(Path(os.environ.get("MOONCAKE_TRACE") or _SHARED))
    return [each for report in simulate(trace, SimulationSettings(), list(POLICIES)) for each in figures_of(report)]


if __name__ == "__main__":
    main("simulation of a trace", run)
