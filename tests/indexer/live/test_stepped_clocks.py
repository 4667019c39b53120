"""The wall clock of a service is set an hour ahead, an hour back and right again: nothing expires, nothing is lost.

A real broker, a real `kvsight serve` and real publisher processes.
"""

from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.stepped_clock import SteppedClock
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("views must be judged right within heartbeats")

HOUR_S = 3600


@pytest.fixture
def clock(tmp_path: Path) -> SteppedClock:
    return SteppedClock(tmp_path / "clock")


@pytest.fixture
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    """A worker expires after less than the step, and not because the machine is slow."""
    return own_topics(kafka_bootstrap, KVSIGHT_WORKER_TTL_S=300)


@pytest.fixture
def engine(topics: dict[str, Any]) -> Iterator[PublishingProcess]:
    with PublishingProcess("w", **topics) as engine:
        yield engine


def seconds_ahead(service: ServiceProcess, reference: float) -> float:
    """The clock that the service's answers name, relative to another one."""
    return parsedate_to_datetime(service.get("/health").headers["date"]).timestamp() - reference


def wait_until_stepped(service: ServiceProcess, began: float, ahead_s: float) -> None:
    wait_until(lambda: abs(seconds_ahead(service, began) - ahead_s) < HOUR_S / 2, 60, "the clock to be stepped")


def states(service: ServiceProcess) -> set[tuple[str, str]]:
    """The state of the worker, asked again and again."""
    listener = service.listener("w")
    return {(listener["state"], listener["stale_reason"])}


@pytest.mark.parametrize("steps", [(HOUR_S, -HOUR_S, 0)])
def test_a_running_service_whose_clock_is_stepped_stays_right(
    topics: dict[str, Any], engine: PublishingProcess, clock: SteppedClock, tmp_path: Path, steps: tuple[int, ...]
) -> None:
    with ServiceProcess(tmp_path, **topics, **clock, KVSIGHT_SNAPSHOT_DIR=tmp_path / "s") as service:
        engine.store(1, 2, 3)
        service.wait_until_ready()
        wait_until(lambda: service.is_right(engine), 60, "the view before")
        began = parsedate_to_datetime(service.get("/health").headers["date"]).timestamp()
        for number, ahead_s in enumerate(steps):
            clock.set(ahead_s)
            wait_until_stepped(service, began, ahead_s)
            assert service.query(MODEL, [1, 2, 3]).json()["instances"]["w"]["longest_matched"] == 12
            engine.store(10 + number)
            wait_until(lambda: service.is_right(engine), 60, f"the view after the step; {states(service)}")
            assert 0 <= service.listener("w")["age_ms"] < HOUR_S * 500
        said = service.log.read_text()
    assert "expired" not in said, said
    assert "Traceback" not in said, said


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_a_service_that_restarts_with_another_clock_is_right_when_it_is_ready(
    topics: dict[str, Any], engine: PublishingProcess, clock: SteppedClock, tmp_path: Path, ahead_s: int
) -> None:
    with ServiceProcess(tmp_path, **topics, **clock, KVSIGHT_SNAPSHOT_DIR=tmp_path / "s") as service:
        engine.store(1, 2, 3)
        service.wait_until_ready()
        wait_until(lambda: service.is_right(engine), 60, "the view before")
        service.terminate()
        clock.set(ahead_s)
        engine.store(4)
        service.start()
        service.wait_until_ready()
        assert service.query(MODEL, [1, 2, 3]).json()["instances"]["w"]["longest_matched"] == 12
        wait_until(lambda: service.is_right(engine), 60, f"the view after the restart; {states(service)}")
        assert "expired" not in service.log.read_text()
