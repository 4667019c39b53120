"""The reports of `kvsight audit --html` and `kvsight simulate --html` in a real browser."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from analysis.audit.audit import audit_log
from analysis.audit.curves import AuditCurves
from analysis.html.audit_page import write_audit_page
from analysis.words import duration
from kv_events.log.event_log import EventLogWriter
from kv_events.schema import SnapshotBegin, SnapshotEnd
from simulation import SimulationSettings, WorkloadSettings, generate, simulate
from tests.support.browser.chromium import DEADLINE_S, FLAGS, chromium_path
from tests.support.commands import kvsight
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, removed, stored

AUDIT_PLOTS = 7
"""Shares, policies, tiers, workers, events, batches and churn: the fleet has no faults."""
HOSTILE = (
    '<img src="https://hostile.example/x" onerror="window.hacked = 1">',
    "</script><script>window.hacked = 1</script>",
    "'); window.hacked = 1; ('",
    "$$\\alpha$$",
    "{{ 7 * 7 }} &lt;b&gt;",
    "right\u202eleft\x00",
)


class Visit:
    """One page in a context of its own."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        """context: arguments of `Browser.new_context`, such as `color_scheme`."""
        self.page: Page = browser.new_context(**context).new_page()
        self.page.set_default_timeout(DEADLINE_S * 1000)
        self.requests: list[str] = []
        """Addresses of everything that was requested, the page itself included."""
        self.faults: list[str] = []
        """Errors and warnings of the console, with violations of the page's policy, and exceptions of scripts."""
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console", lambda line: self.faults.append(line.text) if line.type in ("error", "warning") else None
        )
        self.page.goto(url)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The address of a report of a fleet whose caches are too small, and the same audit as JSON."""
    folder = tmp_path_factory.mktemp("audit")
    settings = SimulationSettings(workers=8, capacity_tokens=8192, event_log_dir=folder)
    simulate(generate(WorkloadSettings(num_requests=150)), settings, ["overlap-load"])
    return report_of(folder / "overlap-load", folder / "report.html")


@pytest.fixture(scope="module")
def visits(browser: Browser, audited: tuple[str, dict[str, Any]]) -> dict[str, Visit]:
    """The report in light and in dark, with all its plots."""
    found = {scheme: Visit(browser, audited[0], color_scheme=scheme) for scheme in ("light", "dark")}
    for visit in found.values():
        wait_for_plots(visit.page, AUDIT_PLOTS)
    return found


def report_of(log: Path, file: Path) -> tuple[str, dict[str, Any]]:
    """Audit a log. Returns the address of its report, and the audit as JSON."""
    done = kvsight("audit", log, "--json", "--html", file)
    assert done.returncode == 0, done.stderr
    assert f"{file}: " in done.stderr
    return file.as_uri(), msgspec.json.decode(done.stdout)


def wait_for_plots(page: Page, number: int) -> None:
    """Wait until all plots are drawn. Locators look into the shadow trees of Bokeh."""
    page.wait_for_function("number => document.querySelectorAll('.plot').length == number", arg=number)
    for plot in page.locator(".plot").all():
        plot.locator("svg text").first.wait_for(state="attached")


def tooltip(page: Page, title: str) -> str:
    """Move the pointer over a plot until a tooltip opens, and return its text."""
    plot = page.locator("figure", has_text=title).locator(".plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    shown = page.locator(".bk-tooltip-row-label, .bk-tooltip-row-value")
    for step in count():
        assert step < 1000, f"no tooltip over {title}"
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 8 * step % box["height"])
        page.evaluate("() => new Promise(requestAnimationFrame)")
        if shown.count():
            return " ".join(shown.all_inner_texts())
    raise AssertionError


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_audit_report_makes_no_request_and_holds_its_plots(
    visits: dict[str, Visit], audited: tuple[str, dict[str, Any]], scheme: str
) -> None:
    visit = visits[scheme]
    assert visit.requests == [audited[0]]
    assert visit.faults == []
    paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    label = visit.page.locator(".plot svg text").first.evaluate("each => getComputedStyle(each).fill")
    expected = {"light": ("rgb(255, 255, 255)", "rgb(87, 96, 106)"), "dark": ("rgb(18, 22, 28)", "rgb(162, 172, 185)")}
    assert (paper, label) == expected[scheme]


def test_the_figures_of_a_report_are_those_of_the_json(
    visits: dict[str, Visit], audited: tuple[str, dict[str, Any]]
) -> None:
    page, report = visits["light"].page, audited[1]
    funnel = report["funnel"]
    assert page.locator(".verdict").inner_text() == report["verdict"]
    tokens = [funnel[name] for name in ("prompt_tokens", "held_in_fleet", "held_by_chosen", "predicted", "delivered")]
    steps = page.locator("#funnel table").first.locator("tbody tr").all()
    assert [row.locator("td").nth(1).inner_text() for row in steps] == [f"{each:,}" for each in tokens]
    shares = [row.locator("td").nth(2).inner_text() for row in steps]
    assert shares == [f"{each / funnel['prompt_tokens']:.1%}" for each in tokens]
    losses = page.locator("#funnel table").nth(1).locator("tbody tr").all()
    assert [row.locator("td").nth(3).inner_text() for row in losses] == [f"{e['tokens']:,}" for e in funnel["losses"]]
    pages = page.locator("#events table").last.locator("tbody tr").all()
    names = ("stored", "removed", "churned", "bounced", "double", "orphan", "unknown", "swept")
    shown = [row.locator("td").all_inner_texts() for row in pages]
    assert shown[:-1] == [[f"{each:,}" for each in report["pages"][name]] for name in names]
    assert shown[-1] == ["-" if each is None else duration(each) for each in report["lifetime_p50_s"]]
    streams = {row.locator("th").inner_text(): row for row in page.locator("#streams tbody tr").all()}
    assert set(streams) == {each["stream"] for each in report["streams"]}
    for each in report["streams"]:
        assert streams[each["stream"]].locator("td").last.inner_text() == f"{each['pages_held']:,}"
    prefixes = page.locator("#prefixes tbody tr").all()
    assert [row.locator("th").inner_text() for row in prefixes] == [
        f"{each['sequence_hash']:016x}" for each in report["hottest"]
    ]


def test_each_plot_has_a_title_a_legend_in_words_and_a_table(visits: dict[str, Visit]) -> None:
    page = visits["light"].page
    figures = page.locator("figure").all()
    assert len(figures) == AUDIT_PLOTS
    for figure in figures:
        assert figure.locator("h3").inner_text()
        legend = [text.strip() for text in figure.locator(".legend li").all_inner_texts()]
        figure.locator("summary").click()
        header = figure.locator("details th").all_inner_texts()
        assert header[0] == "time (UTC)"
        assert sorted(header[1:]) == sorted(legend)
        assert 2 <= figure.locator("details tbody tr").count() <= 24
    assert "2 other workers" in page.locator("figure", has_text="Pages by worker").inner_text()


def test_a_report_fits_on_paper(visits: dict[str, Visit]) -> None:
    visit = visits["dark"]
    assert visit.page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    visit.page.emulate_media(media="print")
    visit.page.set_viewport_size({"width": 695, "height": 900})  # A4 within its margins
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 695
    assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    width = visit.page.locator(".plot .bk-Figure").first.evaluate("each => each.getBoundingClientRect().width")
    assert width == pytest.approx(695, abs=1)


def test_a_report_fits_a_telephone(browser: Browser, audited: tuple[str, dict[str, Any]]) -> None:
    visit = Visit(browser, audited[0], viewport={"width": 360, "height": 740})
    wait_for_plots(visit.page, AUDIT_PLOTS)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 360


def test_names_from_outside_are_text(browser: Browser, tmp_path: Path) -> None:
    log = tmp_path / "log"
    streams = [Stream(name, model=name, tenant=name) for name in HOSTILE]
    with EventLogWriter(log) as writer:
        for second in range(30):
            for number, stream in enumerate(streams):
                pages = range(100 * number + second + 1, 100 * number + second + 5)
                record = stream.batch(stored((0, pages)), removed(pages[:1]), now=1_700_000_000.0 + second)
                if second != 10:
                    writer.append(record)
        for stream in streams:
            resync = (SnapshotBegin(HOSTILE[0]), stored((0, [page for page, _ in stream.held])), SnapshotEnd())
            writer.append(stream.batch(*resync, now=1_700_000_031.0))
    address, report = report_of(log, tmp_path / "report.html")
    assert report["num_resyncs"] == len(HOSTILE)
    visit = Visit(browser, address)
    wait_for_plots(visit.page, 6)
    assert HOSTILE[4] in tooltip(visit.page, "Pages by worker")
    assert "stale:" in tooltip(visit.page, "Faults over time")
    assert visit.page.evaluate("window.hacked") is None
    assert visit.requests == [address]
    assert visit.faults == []
    faults = visit.page.locator("figure", has_text="Faults over time")
    faults.locator("summary").click()
    first = faults.locator("tbody tr").first.locator("td").all_inner_texts()
    assert first == ["2023-11-14 22:13:31.000 UTC", "2023-11-14 22:13:31.000 UTC", HOSTILE[0], "gap"]
    legend = visit.page.locator("figure", has_text="Pages by worker").locator(".legend").inner_text()
    for name in (*HOSTILE[:-1], "right\\u202eleft\\x00"):
        assert name in legend


def test_empty_and_impossible_logs_are_told_in_words(browser: Browser, tmp_path: Path) -> None:
    EventLogWriter(tmp_path / "empty").close()
    record = Stream("w").batch(stored((0, [1, 2])), now=1.0)
    write_log(tmp_path / "forged", [record._replace(timestamp_ms=2**62)])
    for name, words in (
        ("empty", ("The log has no batches.", "The log has no events.", "The log has no decisions of routers.")),
        ("forged", ("No fault found: 1 stream", "@4.61169e+15", "No page was held over a span")),
    ):
        file, series = tmp_path / f"{name}.html", AuditCurves()
        write_audit_page(file, audit_log(tmp_path / name, series=series), series)
        visit = Visit(browser, file.as_uri())
        text = visit.page.locator("body").inner_text()
        assert [each for each in words if each not in text] == []
        assert visit.page.locator("script").count() == 0
        assert file.stat().st_size < 30_000
        assert visit.faults == []


def test_a_comparison_of_policies_shows_the_figures_of_its_json(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    flags = ("--workers", 4, "--capacity", 16_384, "--requests", 200, "--policy", "random", "--policy", "overlap-load")
    done = kvsight("simulate", *flags, "--json", "--html", file)
    assert done.returncode == 0, done.stderr
    reports = msgspec.json.decode(done.stdout)
    visit = Visit(browser, file.as_uri(), color_scheme="dark")
    wait_for_plots(visit.page, 4)
    assert visit.requests == [file.as_uri()]
    assert visit.faults == []
    random, aware = reports
    assert visit.page.locator(".verdict").inner_text() == (
        f"overlap-load finds {aware['found_share']:.1%} of the prompt tokens in cache, "
        f"against {random['found_share']:.1%} with random."
    )
    rows = visit.page.locator("#policies tbody tr").all()
    for row, report in zip(rows[:2], reports, strict=True):
        assert row.locator("th").inner_text() == report["policy"]
        assert row.locator("td").all_inner_texts()[1:-1] == [
            f"{report['found_share']:.1%}",
            f"{report['prompt_tokens'] - report['found_tokens']:,}",
            f"{report['imbalance']:.2f} \N{MULTIPLICATION SIGN} mean",
            f"{report['queries']:,}",
            "0",
        ]
    for row, report in zip(rows[2:], reports, strict=True):
        times = report["latency"]
        assert row.locator("td").all_inner_texts() == [
            f"{times['ttft_p50_s'] * 1000:,.0f} ms",
            f"{times['ttft_p99_s'] * 1000:,.0f} ms",
            f"{times['itl_p50_s'] * 1000:.1f} ms",
            f"{times['itl_p99_s'] * 1000:.1f} ms",
            f"{times['requests_per_s']:.2f}",
            f"{times['goodput_per_s']:.2f}",
        ]
    workers = [row.locator("td").nth(1).inner_text() for row in visit.page.locator("#workers tbody tr").all()]
    assert workers == [f"{load['requests']:,}" for report in reports for load in report["workers"]]
    for figure in visit.page.locator("figure").all():
        assert [text.strip() for text in figure.locator(".legend li").all_inner_texts()] == ["random", "overlap-load"]
