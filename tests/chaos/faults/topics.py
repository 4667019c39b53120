"""Faults of the topics themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

from tests.chaos.faults.fault import fault
from tests.chaos.rig import Rig


@fault("log cut behind the snapshot", touches={"broker", "service", "redis"}, hold_s=3)
def log_cut(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.kill()
    yield
    rig.cut_log()
    time.sleep(random.uniform(0, 0.5))  # records after the cut
    service.start()


@fault("log cut under running services", touches={"broker"}, hold_s=0)
def log_cut_while_reading(rig: Rig, random: Random) -> Iterator[None]:
    rig.cut_log()
    yield


@fault("events topic deleted and made anew", touches={"broker"}, hold_s=0)
def events_deleted(rig: Rig, random: Random) -> Iterator[None]:
    rig.delete_topic(rig.events_topic)
    yield


@fault("control topic deleted and made anew", touches={"broker"}, hold_s=0)
def control_deleted(rig: Rig, random: Random) -> Iterator[None]:
    rig.delete_topic(rig.control_topic)
    yield


@fault("events topic deleted while a service is down", touches={"broker", "service", "redis"}, hold_s=3)
def events_deleted_meanwhile(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.kill()
    rig.delete_topic(rig.events_topic)
    yield
    service.start()
