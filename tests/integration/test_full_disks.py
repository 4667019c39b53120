"""The disk of an event log, or of snapshots, is full and has room again: nothing is lost, no answer fails.

Real processes. A limit on the size of files stands in for the full disk: writes are cut in the middle, as there.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import wait_until


@contextmanager
def full_disk(pid: int, room_bytes: int) -> Iterator[None]:
    """No file of a process grows beyond a size."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (room_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def metric(service: ServiceProcess, name: str) -> float:
    return next(float(line.split()[1]) for line in service.get("/metrics").text.splitlines() if line.startswith(name))


def is_right(service: ServiceProcess, engine: PublishingProcess) -> bool:
    listener = service.listener("w")
    shown = (listener.get("state"), listener.get("pages", {}).get("GPU"))
    return shown == ("live", len(engine.held)) and service.pages("w") <= engine.held


def test_a_full_disk_under_an_event_log_costs_freshness_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        PublishingProcess("w", KVSIGHT_EVENT_LOG_DIR=log) as engine,
        ServiceProcess(tmp_path, KVSIGHT_EVENT_LOG_DIR=log, KVSIGHT_WORKER_TTL_S=300) as service,
    ):
        engine.store(1, 2, 3)
        wait_until(lambda: is_right(service, engine), 60, "the view before")
        size = sum(path.stat().st_size for path in log.glob("*.kvlog"))
        with full_disk(engine.pid, size + 1000):
            engine.store(*range(10, 3000))
            engine.remove(3)
            wait_until(lambda: service.listener("w")["state"] == "stale", 60, "the view to be stale")
            assert service.query(MODEL, [1, 2]).json()["instances"]["w"]["longest_matched"] == 8
        engine.store(4)
        wait_until(lambda: is_right(service, engine), 60, f"the view to be right: {service.log.read_text()}")


def test_a_full_disk_under_snapshots_costs_snapshots_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = {
        "KVSIGHT_EVENT_LOG_DIR": log,
        "KVSIGHT_SNAPSHOT_DIR": tmp_path / "s",
        "KVSIGHT_SNAPSHOT_INTERVAL_S": 0.2,
    }
    with PublishingProcess("w", KVSIGHT_EVENT_LOG_DIR=log) as engine, ServiceProcess(tmp_path, **settings) as service:
        engine.store(*range(1, 2000))
        wait_until(lambda: metric(service, "kvsight_snapshots_written_total") > 0, 60, "a snapshot")
        with full_disk(service.pid, 1000):
            wait_until(lambda: metric(service, "kvsight_snapshot_failures_total") > 1, 60, "snapshots to fail")
            engine.store(3000)
            wait_until(lambda: is_right(service, engine), 60, "the view while the disk is full")
            written = metric(service, "kvsight_snapshots_written_total")
        wait_until(lambda: metric(service, "kvsight_snapshots_written_total") > written, 60, "snapshots to go on")
        failures = metric(service, "kvsight_snapshot_failures_total")
        with full_disk(service.pid, 1000):
            wait_until(lambda: metric(service, "kvsight_snapshot_failures_total") > failures, 60, "snapshots to fail")
            service.kill()
            service.start()
        service.wait_until_ready()
        wait_until(lambda: is_right(service, engine), 60, "the view after the restart")
        assert "Traceback" not in service.log.read_text()
