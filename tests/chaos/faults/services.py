"""Faults of services."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

from tests.chaos.faults.fault import fault
from tests.chaos.rig import SNAPSHOT_INTERVAL_S, Rig

_STARTING_S = 2.0


@fault("service killed while applying", touches={"service"}, hold_s=0)
def service_killed(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    random.choice(rig.engines).burst(random.randrange(2_000, 10_000))
    time.sleep(random.uniform(0, 0.2))
    service.kill()
    yield
    service.start()


@fault("service killed while it writes a snapshot", touches={"service", "redis"}, hold_s=1)
def service_killed_while_saving(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.wait_for_snapshot()
    time.sleep(SNAPSHOT_INTERVAL_S + random.uniform(-0.05, 0.05))  # around the next one
    service.kill()
    yield
    service.start()


@fault("service killed while it loads a snapshot", touches={"service", "redis"}, hold_s=0)
def service_killed_while_loading(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    for _ in range(random.randint(1, 3)):
        service.kill()
        service.launch()
        time.sleep(random.uniform(0, _STARTING_S))
    service.kill()
    yield
    service.start()


@fault("all services killed", touches={"service"}, hold_s=1)
def all_services_killed(rig: Rig, random: Random) -> Iterator[None]:
    for service in rig.services:
        service.kill()
    yield
    for service in rig.services:
        service.launch()
    for service in rig.services:
        service.wait_until_it_listens()


@fault("service stopped for 15 s", touches={"service"}, hold_s=15)
def service_stopped(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.pause()
    yield
    service.resume()
