"""The plots of a report. Each has a legend in words and a table of its values, which the page writes as HTML.

Colours are those of a light page. `templates/plots.css` replaces some of them where the page is dark.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from bokeh.models import ColumnDataSource, DataRange1d, FactorRange, HoverTool, NumeralTickFormatter, Range1d
from bokeh.plotting import figure

from analysis.curves import ChartMarker
from analysis.words import short_name, utc
from kv_events.runtime.words import printable

BLUE, ORANGE, GREEN, PINK, RED = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00"
SKY, YELLOW, GREY = "#56b4e9", "#f0e442", "#8b949e"
TIER_COLOURS = (BLUE, ORANGE, GREEN, PINK)
"""GPU, CPU, disk, external."""
WORKER_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW)
"""These colours, chosen by Okabe and Ito, differ for all kinds of sight."""
_MUTED, _LINE, _PAPER = "#57606a", "#d8dee4", "#ffffff"

MOST_GROUPS = 128
"""Points of a curve that shows what happens in a time."""
_MOST_ROWS = 24
_HEIGHT, _LANE_HEIGHT, _AXIS_HEIGHT = 250, 26, 92
_LEFT, _RIGHT = 92, 16
"""Pixels beside the plots, so that their axes begin and end below each other."""
_SCALES = ((2 * 3600, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))
_CALENDAR_TIME = "%F %T"

Values: TypeAlias = npt.NDArray[np.float64] | npt.NDArray[np.int64]


class Curve(NamedTuple):
    """One curve, or one band of stacked areas."""

    name: str
    values: Values
    """[points]"""
    colour: str
    is_dashed: bool = False


class LegendItem(NamedTuple):
    """A line of a legend: what is drawn, and how."""

    name: str
    colour: str
    shape: str
    """band, line, dashed, or a marker's name. In a timeline, a marker is drawn where something begins."""


@dataclass
class Chart:
    """A plot, and what the page writes around it."""

    title: str
    note: str
    """What is shown, in a sentence."""
    model: figure
    legend: list[LegendItem]
    header: list[str]
    rows: list[list[str]]
    """Of a table with some of the points."""
    num_points: int
    point_name: str = "points"
    is_numeric: bool = True
    """Whether all columns of the table but the first one are numbers."""
    place: str = ""
    """The element in which it is drawn, as HTML."""


class Axis(NamedTuple):
    """The axis of time. The plots of a page share it: what is chosen in one plot is shown in all."""

    at: npt.NDArray[np.float64]
    """[points] where they are on the axis"""
    range: Range1d
    label: str
    is_calendar: bool

    def text(self, point: int) -> str:
        """The time of a point."""
        at = float(self.at[point])
        return utc(at / 1000) if self.is_calendar else f"{at:,.1f}"


def calendar_axis(at_ms: npt.NDArray[np.float64], first_ms: float, last_ms: float) -> Axis:
    """Milliseconds since 1970, shown in UTC."""
    return Axis(at_ms, Range1d(start=first_ms, end=last_ms, bounds="auto"), "time (UTC)", is_calendar=True)


def elapsed_axis(at_s: npt.NDArray[np.float64], last_s: float) -> Axis:
    """Seconds since the beginning, shown in a readable unit."""
    scale, unit = next((scale, unit) for least, scale, unit in _SCALES if last_s >= least)
    return Axis(
        at_s / scale,
        Range1d(start=0, end=last_s / scale, bounds="auto"),
        f"{unit} since the beginning",
        is_calendar=False,
    )


def bands(title: str, note: str, unit: str, axis: Axis, curves: Sequence[Curve]) -> Chart:
    """Areas on top of each other, the first one at the bottom."""
    plot = _time_figure(axis, unit, "0,0.[00]")
    source, columns = _source(axis, curves)
    plot.varea_stack(columns, x="x", source=source, color=[each.colour for each in curves])
    edges = plot.vline_stack(columns, x="x", source=source, color=_PAPER, line_width=1)
    _add_hover(plot, axis, curves[::-1], columns[::-1], edges[-1], "0,0")
    legend = [LegendItem(printable(each.name), each.colour, "band") for each in reversed(curves)]
    return _chart(title, note, plot, legend, axis, curves, "{:,.0f}".format)


def lines(title: str, note: str, unit: str, axis: Axis, curves: Sequence[Curve], *, is_share: bool = False) -> Chart:
    """Curves over time. is_share: values are shares of 1, or NaN where there is no whole."""
    plot = _time_figure(axis, unit, "0%" if is_share else "0,0.[00]", highest=1 if is_share else None)
    source, columns = _source(axis, curves)
    drawn = [
        plot.line(
            "x",
            column,
            source=source,
            color=each.colour,
            line_width=2,
            line_join="round",
            line_dash="dashed" if each.is_dashed else "solid",
        )
        for each, column in zip(curves, columns, strict=True)
    ]
    alone = ColumnDataSource({column: _alone(each.values) for column, each in zip(columns, curves, strict=True)})
    alone.data["x"] = axis.at
    for column, each in zip(columns, curves, strict=True):
        plot.scatter("x", column, source=alone, size=4, color=each.colour)
    _add_hover(plot, axis, curves, columns, drawn[0], "0.0%" if is_share else "0,0.[0]")
    legend = [LegendItem(printable(each.name), each.colour, "dashed" if each.is_dashed else "line") for each in curves]
    return _chart(
        title,
        note,
        plot,
        legend,
        axis,
        curves,
        (lambda share: "-" if np.isnan(share) else f"{share:.1%}") if is_share else "{:,.1f}".format,
    )


def shares_of(part: npt.NDArray[np.int64], whole: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """part / whole, [points]; NaN where there is no whole."""
    shares = np.full(len(whole), np.nan)
    np.divide(part, whole, out=shares, where=whole > 0)
    return shares


def _alone(values: Values) -> Values:
    """The points without a neighbour, of which a curve would show nothing."""
    is_known = np.pad(~np.isnan(values), 1)
    return np.where(is_known[:-2] | is_known[2:], np.nan, values)


def lanes(
    title: str,
    note: str,
    axis: Axis,
    names: Mapping[str, str],
    items: Sequence[ChartMarker],
    styles: Sequence[LegendItem],
) -> Chart:
    """What happened to some streams over time, a row for each of them. names: stream -> what it is called."""
    factors = _distinct([short_name(each) for each in names.values()])
    rows = dict(zip(names, factors, strict=True))
    plot = _figure(axis, height=_AXIS_HEIGHT + _LANE_HEIGHT * len(rows), y_range=FactorRange(factors=factors[::-1]))
    legend = []
    for style in styles:
        chosen = [each for each in items if each.kind == style.name]
        if chosen:
            legend.append(style)
            columns = {
                "y": [rows[each.stream] for each in chosen],
                "begin": [each.begin_ms for each in chosen],
                "end": [each.end_ms for each in chosen],
                "worker": [printable(names[each.stream]) for each in chosen],
            }
            _draw_lane_items(plot, style, ColumnDataSource(columns))
    header = ["time (UTC)", "until", "worker", "what"]
    cells = [
        [utc(each.begin_ms / 1000), utc(each.end_ms / 1000), printable(names[each.stream]), each.kind]
        for each in sorted(items, key=lambda each: each.begin_ms)[:_MOST_ROWS]
    ]
    return Chart(title, note, plot, legend, header, cells, len(items), "marks, the first ones", is_numeric=False)


def _draw_lane_items(plot: figure, style: LegendItem, source: ColumnDataSource) -> None:
    tips = [("stream", "@worker"), (style.name, f"@begin{{{_CALENDAR_TIME}}} UTC")]
    drawn: Any
    if style.shape == "band":
        drawn = plot.hbar("y", left="begin", right="end", height=0.5, source=source, color=style.colour)
        tips.append(("until", f"@end{{{_CALENDAR_TIME}}} UTC"))
    else:
        drawn = plot.scatter(
            "begin", "y", source=source, marker=style.shape, size=10, fill_color=style.colour, line_color=_PAPER
        )
    plot.add_tools(
        HoverTool(renderers=[drawn], tooltips=tips, formatters=dict.fromkeys(("@begin", "@end"), "datetime"))
    )


def _distinct(labels: list[str]) -> list[str]:
    """Rows need names that differ, even where they were shortened."""
    return [
        f"{label} ({labels[:place].count(label) + 1})" if label in labels[:place] else label
        for place, label in enumerate(labels)
    ]


def _time_figure(axis: Axis, unit: str, number_format: str, highest: float | None = None) -> figure:
    """highest: end of the axis of values. None: that of the data."""
    values = DataRange1d(start=0) if highest is None else DataRange1d(start=0, end=highest)
    plot = _figure(axis, height=_HEIGHT, y_axis_label=unit, y_range=values)
    plot.yaxis.formatter = NumeralTickFormatter(format=number_format)
    return plot


def _figure(axis: Axis, **more: Any) -> figure:
    plot = figure(
        sizing_mode="stretch_width",
        output_backend="svg",  # can be coloured by CSS, and is sharp on paper
        x_axis_type="datetime" if axis.is_calendar else "auto",
        x_range=axis.range,
        x_axis_label=axis.label,
        tools="xbox_zoom,xpan,reset",
        active_drag="xbox_zoom",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=_LEFT,
        min_border_right=_RIGHT,
        **more,
    )
    plot.toolbar.autohide = True
    plot.toolbar.logo = None
    plot.xgrid.grid_line_color = None
    plot.ygrid.grid_line_color = _LINE
    for each in plot.axis:
        each.axis_line_color = each.major_tick_line_color = _LINE
        each.minor_tick_line_color = None
        each.axis_label_text_color = each.major_label_text_color = _MUTED
        each.axis_label_text_font_style = "normal"
        each.axis_label_text_font_size = each.major_label_text_font_size = "13px"
        each.axis_label_text_font = each.major_label_text_font = "system-ui, sans-serif"
    return plot


def _source(axis: Axis, curves: Sequence[Curve]) -> tuple[ColumnDataSource, list[str]]:
    """The values under names of our own: those from outside are only shown."""
    columns = [f"c{number}" for number in range(len(curves))]
    values = {column: each.values for column, each in zip(columns, curves, strict=True)}
    return ColumnDataSource({"x": axis.at, **values}), columns


def _add_hover(
    plot: figure, axis: Axis, curves: Sequence[Curve], columns: Sequence[str], drawn: Any, number_format: str
) -> None:
    times = f"@x{{{_CALENDAR_TIME}}}" if axis.is_calendar else "@x{0,0.[0]}"
    tips = [
        (short_name(each.name), f"@{column}{{{number_format}}}") for each, column in zip(curves, columns, strict=True)
    ]
    formatters: Any = {"@x": "datetime"} if axis.is_calendar else {}
    tips.insert(0, (axis.label, times))
    plot.add_tools(HoverTool(renderers=[drawn], mode="vline", tooltips=tips, formatters=formatters))


def _chart(
    title: str,
    note: str,
    plot: figure,
    legend: list[LegendItem],
    axis: Axis,
    curves: Sequence[Curve],
    shown: Callable[[float], str],
) -> Chart:
    num_points = len(axis.at)
    points = np.unique(np.linspace(0, num_points - 1, min(num_points, _MOST_ROWS)).round().astype(np.int64)).tolist()
    header = [axis.label, *(printable(each.name) for each in curves)]
    rows = [[axis.text(point), *(shown(float(each.values[point])) for each in curves)] for point in points]
    return Chart(title, note, plot, legend, header, rows, num_points)
