"""The report of a comparison of policies, as one HTML file. Needs the extra `analysis`."""

from __future__ import annotations

from collections.abc import Sequence
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
    courses = [each.course for each in reports if each.course is not None]
    if len(courses) < len(reports) or len(courses[0].bins.middles_ms) < 2:
        return {"found": None, "load": None, "work": None}
    groups = Groups(courses[0].bins, MOST_GROUPS)
    axis = elapsed_axis(groups.at_ms / 1000, courses[0].bins.last_ms / 1000)
    each_point = f"Each point covers {duration(groups.width_s)}."
    found, computed = [], []
    for course in courses:
        found.append(groups.sums(course.found_tokens))
        computed.append(groups.sums(course.prompt_tokens) - found[-1])
    names = [each.policy for each in reports]
    return {
        "found": lines(
            "Hit share",
            f"Share of the prompt tokens that were in the cache of the worker that got them. {each_point}",
            "share of prompt tokens",
            axis,
            _curves(
                names,
                [
                    shares_of(part.sum(axis=1), (part + rest).sum(axis=1))
                    for part, rest in zip(found, computed, strict=True)
                ],
            ),
            is_share=True,
        ),
        "work": lines(
            "Work",
            f"Prompt tokens that all workers together had to compute. {each_point}",
            "tokens/s",
            axis,
            _curves(names, [tokens.sum(axis=1) / groups.seconds for tokens in computed]),
        ),
        "load": lines(
            "Load of the busiest worker",
            f"Prompt tokens that the busiest worker had to compute, as a multiple of the mean. 1 is even. {each_point}",
            "times the mean",
            axis,
            _curves(names, [_imbalance(tokens) for tokens in computed]),
        ),
    }


def _curves(names: Sequence[str], values: Sequence[npt.NDArray[np.float64]]) -> list[Curve]:
    colours = [WORKER_COLOURS[number % len(WORKER_COLOURS)] for number in range(len(names))]
    return [Curve(*each) for each in zip(names, values, colours, strict=True)]


def _imbalance(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """tokens: [groups, workers]. Returns [groups]: that of the busiest worker / the mean; NaN without any."""
    return shares_of(tokens.max(axis=1) * tokens.shape[1], tokens.sum(axis=1))
