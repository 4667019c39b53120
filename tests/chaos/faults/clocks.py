"""Clocks that are stepped by an hour, ahead or back, and set right again."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.chaos.faults.fault import fault
from tests.chaos.rig import Rig

_STEPS_S = (-3600, 3600)


@fault("clock of an engine stepped by an hour", touches={"engine"}, hold_s=3)
def engine_clock(rig: Rig, random: Random) -> Iterator[None]:
    engine = random.choice(rig.engines)
    engine.clock.step(random.choice(_STEPS_S))
    yield
    engine.clock.step(0)


@fault("clock of a service stepped by an hour", touches={"service"}, hold_s=3)
def service_clock(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.clock.step(random.choice(_STEPS_S))
    yield
    service.clock.step(0)


@fault("service restarted with a clock wrong by an hour", touches={"service"}, hold_s=3)
def service_restarted(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.kill()
    service.clock.set(random.choice(_STEPS_S))
    service.start()
    yield
    service.clock.step(0)


@fault("engine restarted with a clock set back by an hour", touches={"engine"})
def engine_restarted(rig: Rig, random: Random) -> Iterator[None]:
    """Its epoch is smaller than before, so it is believed after two missing heartbeats."""
    engine = random.choice(rig.engines)
    engine.kill()
    engine.clock.set(-3600)
    yield
    engine.start()
    engine.clock.step(0)
