"""The report of a comparison of policies, as one HTML file. Needs the extra `analysis`."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from analysis.curves import Groups
from analysis.html.page import write_page
from analysis.html.plots import MOST_GROUPS, WORKER_COLOURS, Chart, Curve, elapsed_axis, lines, shares_of
from analysis.words import duration
from simulation.report import PolicyReport
from simulation.settings import SimulationSettings

_MOST_WORKERS = 32


def write_simulation_page(
    path: Path, reports: Sequence[PolicyReport], settings: SimulationSettings, workload: str
) -> int:
    """Write a report. reports: at least one, all of the same workload. Returns the size in bytes. Raises OSError.

    workload: its name.
    """
    return write_page(
        path,
        "simulation.html",
        _charts(reports),
        reports=reports,
        settings=settings,
        workload=workload,
        verdict=_verdict(reports),
        num_wrong=sum(each.divergent_pages + each.divergent_answers for each in reports),
        most_workers=_MOST_WORKERS,
    )


def _verdict(reports: Sequence[PolicyReport]) -> str:
    best, *others = sorted(reports, key=lambda each: each.found_share, reverse=True)
    if not best.requests:
        return "The workload has no requests."
    found = f"{best.policy} finds {best.found_share:.1%} of the prompt tokens in cache"
    if not others:
        return f"{found}."
    against = " and ".join(f"{each.found_share:.1%} with {each.policy}" for each in others)
    return f"{found}, against {against}."


def _charts(reports: Sequence[PolicyReport]) -> dict[str, Chart | None]:
    """All policies served the same requests, so their bins are equal."""
    curves = [each.curves for each in reports if each.curves is not None]
    if len(curves) < len(reports) or len(curves[0].bins.middles_ms) < 2:
        return dict.fromkeys(("found", "load", "work", "ttft"))
    groups = Groups(curves[0].bins, MOST_GROUPS)
    axis = elapsed_axis(groups.at_ms / 1000, curves[0].bins.last_ms / 1000)
    found = [groups.sums(each.found_tokens) for each in curves]
    asked = [groups.sums(each.prompt_tokens) for each in curves]
    computed = [total - part for total, part in zip(asked, found, strict=True)]
    hits = [shares_of(part.sum(axis=1), total.sum(axis=1)) for part, total in zip(found, asked, strict=True)]

    def chart(title: str, text: str, unit: str, values: list[npt.NDArray[np.float64]], **more: bool) -> Chart | None:
        names = [each.policy for each in reports]
        by_policy = [Curve(*each) for each in zip(names, values, cycle(WORKER_COLOURS))]
        return lines(title, f"{text} Each point covers {duration(groups.width_s)}.", unit, axis, by_policy, **more)

    waits = [
        shares_of(groups.sums(each.ttft_ms).sum(axis=1), groups.sums(each.requests).sum(axis=1)) for each in curves
    ]
    return {
        "ttft": None
        if reports[0].latency is None
        else chart("Time to the first token", "Mean of the requests that arrived in that time.", "ms", waits),
        "found": chart(
            "Hit share",
            "Share of the prompt tokens that were in the cache of the worker that got them.",
            "share of prompt tokens",
            hits,
            is_share=True,
        ),
        "work": chart(
            "Work",
            "Prompt tokens that all workers together had to compute.",
            "tokens/s",
            [tokens.sum(axis=1) / groups.seconds for tokens in computed],
        ),
        "load": chart(
            "Load of the busiest worker",
            "Prompt tokens that the busiest worker had to compute, as a multiple of the mean. 1 is even.",
            "times the mean",
            [shares_of(each.max(axis=1) * each.shape[1], each.sum(axis=1)) for each in computed],
        ),
    }
