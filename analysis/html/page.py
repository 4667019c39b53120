"""Writes a report as one file. Nothing in it is loaded from elsewhere, and its policy allows only its own scripts."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from bokeh.embed import components
from bokeh.resources import Resources
from markupsafe import Markup

from analysis import words
from analysis.html.plots import Chart
from kv_events.runtime.words import count, printable

_FILTERS = (printable, words.number, words.size, count, words.utc, words.duration)


def write_page(path: Path, template: str, charts: Mapping[str, Chart | None], **facts: Any) -> int:
    """Render a template and write it. Returns the size in bytes. Raises OSError.

    charts: by the name that the template uses; None: there is nothing to draw. facts: more for the template.
    """
    scripts = _scripts([chart for chart in charts.values() if chart is not None])
    page = _environment().get_template(template)
    data = page.render(scripts=scripts, policy=_policy(scripts), charts=charts, **facts).encode()
    path.write_bytes(data)
    return len(data)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({each.__name__: each for each in _FILTERS})
    environment.globals.update(share=words.share, version=version("kvsight"))
    return environment


def _scripts(charts: list[Chart]) -> list[Markup]:
    """BokehJS, the plots, and what gives them the colours of the page. None without plots."""
    if not charts:
        return []
    drawing, places = components(tuple(chart.model for chart in charts), wrap_script=False)
    for chart, place in zip(charts, places, strict=True):
        chart.place = Markup(place)  # noqa: S704  (an empty element with an id)
    library = Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw
    ours = (Path(__file__).parent / "templates" / "plots.js").read_text()
    return [_script(text) for text in (*library, ours, drawing)]


def _script(text: str) -> Markup:
    """A script as the content of its element, which it must not end."""
    text = text.replace("\r", "")
    assert "</script" not in text.lower(), "Bokeh escapes `<` in all data"
    return Markup(text)  # noqa: S704


def _policy(scripts: Sequence[str]) -> str:
    """The page's Content-Security-Policy: no request, and no script but these."""
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
