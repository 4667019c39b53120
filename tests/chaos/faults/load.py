"""More load than usual."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.chaos.faults.fault import fault
from tests.chaos.rig import Rig

_BURST_PAGES = 500_000


@fault("burst of 500,000 pages", touches={"engine"}, hold_s=0)
def burst(rig: Rig, random: Random) -> Iterator[None]:
    rig.engines[-1].burst(_BURST_PAGES)
    yield


@fault("burst of 500,000 pages beside a stopped service", touches={"engine", "service"}, hold_s=0)
def burst_beside_a_slow_service(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.pause()
    rig.engines[-1].burst(_BURST_PAGES)
    yield
    service.resume()
