"""Pictures of the page and of a report for the documentation: `python -m tests.support.browser.pictures [FOLDER]`"""

import asyncio
import math
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from playwright.async_api import Browser, FloatRect, Page

from analysis.audit.audit import audit_log
from analysis.audit.curves import AuditCurves
from analysis.html.audit_page import write_audit_page
from api.app import create_app
from api.replay.service import ReplayService
from api.server import running_server
from api.settings import ApiSettings
from kv_events.log.event_log import EventLogWriter
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from simulation import Request, SimulationSettings, WorkloadSettings, generate
from simulation.run import TimedFleet
from tests.support.browser.chromium import Scheme, new_page, running_browser
from tests.support.browser.shown_fleet import POLICY, ShownFleet, shown_fleet

_FOLDER = Path(__file__).resolve().parents[3] / "docs" / "images"
_RECORDING = _FOLDER.parents[1] / "examples" / "routing_anomaly"
_SERVE_S = 60.0
_RATE = 6.0
_HOUR_S = 3600.0
_FLEET = 200
_WORKER = 3
_OUTAGE_S = 20.0
_NOTICED_S = 4.0
_CLIPS: tuple[tuple[str, Scheme, str, str], ...] = (
    ("report-light", "light", "header", "#funnel figure"),
    ("report-dark", "dark", "#held", "#held figure:nth-of-type(2)"),
)
"""Pictures of a report: name, scheme, and the first and the last element."""


class _Picture(NamedTuple):
    name: str
    width: int
    height: int
    scheme: Scheme = "light"
    query: str = ""


_PICTURES = (
    _Picture("page-light", 1600, 1180),
    _Picture("page-dark", 1600, 1180, "dark"),
    _Picture("page-narrow", 360, 1180),
    _Picture("page-worker", 1600, 1180, query="?worker=worker-1"),
)


async def main(folder: Path) -> None:
    """Write all pictures."""
    async with shown_fleet(ApiSettings(port=0), num_requests=300, workers=6) as shown, running_browser() as browser:
        pages = {each: await new_page(browser, each.width, each.height, each.scheme) for each in _PICTURES}
        for picture, page in pages.items():
            await page.goto(f"{shown.url}/{picture.query}")
        await _serve(shown)
        for picture, page in pages.items():
            await _settle(page)
            await page.screenshot(path=folder / f"{picture.name}.png")
        await _show_past(browser, folder / "page-past.png")
    async with (
        shown_fleet(ApiSettings(port=0), num_requests=300, workers=_FLEET) as shown,
        running_browser() as browser,
    ):
        page = await new_page(browser, 1440, 1000)
        await page.goto(shown.url)
        await _serve(shown, 10.0)
        await _settle(page)
        await page.screenshot(path=folder / "page-fleet.png")
        await _show_report(browser, folder)


async def _show_past(browser: Browser, picture: Path) -> None:
    """Write a picture of the page over the past of the example's recording, with what has changed since a moment."""
    settings = ApiSettings(port=0)
    async with running_server(create_app(ReplayService(_RECORDING, settings, LogMoment(), [])), settings) as url:
        page = await new_page(browser, 1400, 900)
        await page.goto(f"{url}/?at=400&from=250")
        await page.locator("#past table.difference").wait_for()
        await page.locator("#past .legend", has_text="resync", has_not_text="searching").wait_for()
        await _settle(page)
        await page.screenshot(path=picture)


class _LossyLog(EventLogWriter):
    """A log that loses all batches of a worker for a time."""

    lost_worker = ""

    def append(self, record: LogRecord) -> int:
        """See `EventLogWriter`."""
        is_lost = record.channel == Channel.EVENTS and f"/{self.lost_worker}/" in record.key.decode()
        return self.next_index if is_lost else super().append(record)


def _record_a_faulty_run(folder: Path, requests: list[Request]) -> None:
    """Record a fleet of which one worker loses batches for 20 seconds, and sends everything again soon after."""
    settings = SimulationSettings(workers=8, capacity_tokens=2**16, cache="hiradix", disk_ratio=4.0)
    with _LossyLog(folder) as log:
        fleet = TimedFleet(settings, POLICY, log)
        publisher = fleet.run.workers[_WORKER].publisher
        outage_s = requests[len(requests) // 2].arrival_s
        resync_s = outage_s + _OUTAGE_S + _NOTICED_S
        for request in requests:
            is_lost = outage_s <= request.arrival_s < outage_s + _OUTAGE_S
            log.lost_worker = publisher.stream.worker if is_lost else ""
            if request.arrival_s >= resync_s:
                publisher.request_resync("gap")
                resync_s = math.inf
            fleet.arrive(request)
        fleet.run_until(math.inf)


async def _show_report(browser: Browser, folder: Path) -> None:
    """Write pictures of the audit of such a run."""
    with tempfile.TemporaryDirectory() as scratch:
        log, file, series = Path(scratch) / "recording", Path(scratch) / "report.html", AuditCurves()
        _record_a_faulty_run(log, generate(WorkloadSettings(num_requests=1500, sessions_per_s=1.0)))
        report = audit_log(log, series=series)
        report.log = log.name
        write_audit_page(file, report, series)
        for name, scheme, first, last in _CLIPS:
            page = await new_page(browser, 1040, 900, scheme)
            await page.goto(file.as_uri())
            await page.locator(".plot svg text").first.wait_for(state="attached")
            await _settle(page)
            top, bottom = [await page.locator(each).first.bounding_box() for each in (first, last)]
            assert top is not None
            assert bottom is not None
            height = bottom["y"] + bottom["height"] - top["y"]
            clip = FloatRect(x=0, y=top["y"], width=1040, height=height)
            await page.screenshot(path=folder / f"{name}.png", full_page=True, clip=clip)


async def _serve(shown: ShownFleet, seconds: float = _SERVE_S) -> None:
    """Serve requests again for some time, so that there are curves. Their decisions are of the last hour."""
    requests, number = iter(shown.requests * 100), int(seconds * _RATE)
    for left in range(number, 0, -1):
        shown.serve(next(requests), _HOUR_S * (left - 1) / number)
        await asyncio.sleep(1 / _RATE)


async def _settle(page: Page) -> None:
    await page.bring_to_front()
    await page.wait_for_timeout(2500)


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER
    chosen.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(chosen))
