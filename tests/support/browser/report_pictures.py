"""Pictures of an audit's report for the documentation: `python -m tests.support.browser.report_pictures [FOLDER]`"""

import math
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import FloatRect

from analysis.audit.audit import audit_log
from analysis.audit.curves import AuditCurves
from analysis.html.audit_page import write_audit_page
from kv_events.log.event_log import EventLogWriter
from kv_events.records import Channel, LogRecord
from simulation import Request, SimulationSettings, WorkloadSettings, generate
from simulation.run import TimedFleet
from tests.support.browser.visit import Visit, open_browser

_FOLDER = Path(__file__).resolve().parents[3] / "docs" / "images"
_POLICY = "overlap-load"
_WORKER = 3
_OUTAGE_S = 20.0
_NOTICED_S = 4.0
_CLIPS = (
    ("report-light", "light", "header", "#funnel figure"),
    ("report-dark", "dark", "#held", "#held figure:nth-of-type(2)"),
)
"""Name, scheme, and the first and the last element of the picture."""


class _LossyLog(EventLogWriter):
    """A log that loses all batches of a worker for a time."""

    lost_worker = ""

    def append(self, record: LogRecord) -> int:
        """See `EventLogWriter`."""
        is_lost = record.channel == Channel.EVENTS and f"/{self.lost_worker}/" in record.key.decode()
        return self.next_index if is_lost else super().append(record)


def record_a_faulty_run(folder: Path, requests: list[Request]) -> None:
    """Record a fleet of which one worker loses batches for 20 seconds, and sends everything again soon after."""
    settings = SimulationSettings(workers=8, capacity_tokens=2**16, cache="hiradix", disk_ratio=4.0)
    with _LossyLog(folder) as log:
        fleet = TimedFleet(settings, _POLICY, log)
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


def main(folder: Path) -> None:
    """Write all pictures."""
    with tempfile.TemporaryDirectory() as scratch, open_browser() as browser:
        log, file, series = Path(scratch) / "recording", Path(scratch) / "report.html", AuditCurves()
        record_a_faulty_run(log, generate(WorkloadSettings(num_requests=1500, sessions_per_s=1.0)))
        report = audit_log(log, series=series)
        report.log = log.name
        write_audit_page(file, report, series)
        for name, scheme, first, last in _CLIPS:
            page = Visit(browser, file.as_uri(), color_scheme=scheme, viewport={"width": 1040, "height": 900}).page
            page.locator(".plot svg text").first.wait_for(state="attached")
            page.wait_for_timeout(2500)
            top, bottom = page.locator(first).first.bounding_box(), page.locator(last).first.bounding_box()
            assert top is not None
            assert bottom is not None
            height = bottom["y"] + bottom["height"] - top["y"]
            clip = FloatRect(x=0, y=top["y"], width=1040, height=height)
            page.screenshot(path=folder / f"{name}.png", full_page=True, clip=clip)


if __name__ == "__main__":
    chosen_folder = Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER
    chosen_folder.mkdir(parents=True, exist_ok=True)
    main(chosen_folder)
