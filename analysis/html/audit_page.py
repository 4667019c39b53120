"""The report of an audit: the same figures as `kvsight audit --json`, and curves over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from analysis.audit import curves as facts
from analysis.audit.curves import AuditCurves
from analysis.audit.report import PAGE_COUNTS, AuditReport, StreamReport
from analysis.curves import Groups
from analysis.html.page import write_page
from analysis.html.plots import (
    BLUE,
    GREEN,
    GREY,
    MOST_GROUPS,
    ORANGE,
    PINK,
    RED,
    SKY,
    TIER_COLOURS,
    WORKER_COLOURS,
    YELLOW,
    Chart,
    Curve,
    LegendItem,
    bands,
    calendar_axis,
    lanes,
    lines,
    shares_of,
)
from analysis.kernels.residency import COUNT_NAMES
from analysis.words import duration
from kv_events.schema import NUM_MEDIA

TIERS = ("GPU", "CPU", "disk", "external")
BEST, CHOSEN, AVERAGE = "always the candidate that holds most", "the routers' choice", "a candidate at random"
"""Policies: two that are thought of, and what happened."""
_CHARTS = ("shares", "policies", "tiers", "workers", "rates", "batches", "churn", "faults")
_MOST_ROWS = 20
_LANE_STYLES = (
    LegendItem("stale", ORANGE, "band"),
    LegendItem("syncing", SKY, "band"),
    LegendItem(facts.GAP, RED, "triangle"),
    LegendItem(facts.DIGEST, PINK, "square"),
    LegendItem(facts.RESTART, YELLOW, "diamond"),
    LegendItem(facts.RESYNC, BLUE, "circle"),
)


def write_audit_page(path: Path, report: AuditReport, series: AuditCurves) -> int:
    """Write a report. Returns the size in bytes. Raises OSError."""
    requests = series.requests.values.sum(axis=0)
    is_span = len(series.bins.middles_ms) > 1
    return write_page(
        path,
        "audit.html",
        _Curves(report, series).charts() if is_span else dict.fromkeys(_CHARTS),
        report=report,
        policies=_policies(requests),
        offered=requests[facts.OFFERED],
        chosen=CHOSEN,
        worst=_worst(report.streams),
        page_rows=[(text.format(churn=report.churn_s), report.pages[name]) for name, text in PAGE_COUNTS.items()],
        tiers=TIERS,
    )


def _policies(tokens: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
    """What a policy would have found in the caches as they were, in tokens of requests that list their candidates.

    tokens: [..., columns of `analysis.audit.curves`].
    """
    return {BEST: tokens[..., facts.BEST], CHOSEN: tokens[..., facts.TAKEN], AVERAGE: tokens[..., facts.MEAN]}


class _Curves:
    """The charts of a report over a span of time. Each is None if there is nothing to draw."""

    def __init__(self, report: AuditReport, series: AuditCurves) -> None:
        self._report, self._series = report, series
        bins = series.bins
        self._shown = bins.shown
        at_ms = bins.middles_ms
        self._groups = Groups(bins, MOST_GROUPS)
        """What happens in a time is drawn by groups, what is held at a time by bins."""
        self._axis = calendar_axis(at_ms, bins.first_ms, bins.last_ms)
        self._group_axis = self._axis._replace(at=self._groups.at_ms)
        self._width = f"Each point covers {duration(bins.width_ms / 1000)}."
        self._group_width = f"Each point covers {duration(self._groups.width_s)}."

    def charts(self) -> dict[str, Chart | None]:
        return {name: getattr(self, name)() for name in _CHARTS}

    def shares(self) -> Chart | None:
        if self._report.funnel is None or not self._report.funnel.requests:
            return None
        tokens = self._groups.sums(self._series.requests)
        prompts = tokens[:, facts.PROMPT]
        return lines(
            "Cached share of the prompts",
            "Shares of the prompt tokens, by the time of the decision. What was delivered is a share of the requests "
            f"with a known outcome. {self._group_width}",
            "share of prompt tokens",
            self._group_axis,
            [
                Curve("held in the fleet", shares_of(tokens[:, facts.FLEET], prompts), GREY),
                Curve("held by the chosen worker", shares_of(tokens[:, facts.CHOSEN], prompts), ORANGE),
                Curve("predicted", shares_of(tokens[:, facts.PREDICTED], prompts), PINK, is_dashed=True),
                Curve("delivered", shares_of(tokens[:, facts.DELIVERED], tokens[:, facts.ANSWERED]), BLUE),
            ],
            is_share=True,
        )

    def policies(self) -> Chart | None:
        if not self._series.requests.values[:, facts.OFFERED].any():
            return None
        tokens = self._groups.sums(self._series.requests)
        offered = tokens[:, facts.OFFERED]
        found = {policy: shares_of(part, offered) for policy, part in _policies(tokens).items()}
        return lines(
            "Hit share by policy",
            f"Shares of the prompt tokens of requests that list their candidates. {self._group_width}",
            "share of prompt tokens",
            self._group_axis,
            [
                Curve(BEST, found[BEST], GREY),
                Curve(CHOSEN, found[CHOSEN], BLUE),
                Curve(AVERAGE, found[AVERAGE], ORANGE, is_dashed=True),
            ],
            is_share=True,
        )

    def tiers(self) -> Chart | None:
        levels = self._series.tiers.values[self._shown]
        if not levels.any():
            return None
        used = [tier for tier in range(NUM_MEDIA) if levels[:, tier].any()]
        curves = [Curve(TIERS[tier], levels[:, tier], TIER_COLOURS[tier]) for tier in used]
        note = f"Pages held by all workers. A page on two tiers counts on both. {self._width}"
        return bands("Pages by tier", note, "pages", self._axis, curves)

    def workers(self) -> Chart | None:
        whole = self._series.tiers.values[self._shown].sum(axis=1)
        if not whole.any():
            return None
        held = {worker: levels.values[self._shown, 0] for worker, levels in self._series.workers.items()}
        largest = sorted(held, key=lambda worker: -int(held[worker].sum()))[: len(WORKER_COLOURS)]
        curves = [Curve(worker, held[worker], colour) for worker, colour in zip(largest, WORKER_COLOURS, strict=False)]
        num_others = len({each.worker for each in self._report.streams}) - len(largest)
        if num_others:
            rest = whole - np.sum([each.values for each in curves], axis=0)
            curves.append(Curve("1 other worker" if num_others == 1 else f"{num_others:,} other workers", rest, GREY))
        note = f"Pages held by each worker, summed over the tiers. {self._width}"
        return bands("Pages by worker", note, "pages", self._axis, curves[::-1])

    def rates(self) -> Chart | None:
        curves = [
            Curve("stored", self._rate("stored"), BLUE),
            Curve("removed", self._rate("removed"), ORANGE),
            Curve("dropped by clears and resyncs", self._rate("swept"), GREY, is_dashed=True),
        ]
        note = f"Pages a second, summed over all workers. {self._group_width}"
        shown = [each for each in curves if each.values.any()] or curves[:2]
        return lines("Events", note, "pages/s", self._group_axis, shown)

    def batches(self) -> Chart | None:
        rate = self._groups.sums(self._series.batches)[:, 0] / self._groups.seconds
        note = f"Batches a second of all workers, heartbeats included. At 0, no worker was heard. {self._group_width}"
        return lines("Batches", note, "batches/s", self._group_axis, [Curve("batches", rate, BLUE)])

    def churn(self) -> Chart | None:
        within = f"within {self._report.churn_s:g} s"
        curves = [
            Curve(f"evicted {within} after they were stored", self._rate("churned"), RED),
            Curve(f"back {within} after they were evicted", self._rate("bounced"), GREEN),
        ]
        shown = [each for each in curves if each.values.any()]
        note = f"Pages a second, summed over all workers. {self._group_width}"
        return lines("Churn", note, "pages/s", self._group_axis, shown) if shown else None

    def faults(self) -> Chart | None:
        if not self._series.marks:
            return None
        marked = {mark.stream for mark in self._series.marks}
        streams = _worst([each for each in self._report.streams if each.stream in marked])
        names = {each.stream: each.worker for each in streams}
        if len(set(names.values())) < len(names):
            names = {stream: stream for stream in names}
        note = "A bar lasts as long as the view was not live. The first resync of a stream is not marked."
        if len(names) < len(marked):
            note += f" The worst {len(names)} of {len(marked):,} streams."
        if self._series.num_more_marks:
            note += f" {self._series.num_more_marks:,} later marks are left out."
        items = [mark for mark in self._series.marks if mark.stream in names]
        return lanes("Faults over time", note, self._axis, names, items, _LANE_STYLES)

    def _rate(self, name: str) -> npt.NDArray[np.float64]:
        """[groups] pages a second by what happened to them, summed over the tiers."""
        first = COUNT_NAMES.index(name) * NUM_MEDIA
        pages = self._groups.sums(self._series.pages)[:, first : first + NUM_MEDIA].sum(axis=1)
        return np.asarray(pages / self._groups.seconds, np.float64)


def _worst(streams: Sequence[StreamReport]) -> list[StreamReport]:
    return sorted(streams, key=lambda each: each.trouble, reverse=True)[:_MOST_ROWS]
