"""Faults of a bridge, and of the engine behind it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.chaos.faults.fault import fault
from tests.chaos.rig import Rig


@fault("bridge killed while its engine goes on", touches={"bridge"}, hold_s=3)
def bridge_killed(rig: Rig, random: Random) -> Iterator[None]:
    rig.bridge.kill()
    yield
    rig.bridge.start(rig.bridged)


@fault("bridge killed for 12 s", touches={"bridge"}, hold_s=12)
def bridge_away(rig: Rig, random: Random) -> Iterator[None]:
    rig.bridge.kill()
    yield
    rig.bridge.start(rig.bridged)


@fault("engine behind the bridge restarted", touches={"bridge"})
def bridged_engine_killed(rig: Rig, random: Random) -> Iterator[None]:
    rig.bridged.kill()
    yield
    rig.bridged.start()


@fault("engine and bridge restarted", touches={"bridge"})
def both_killed(rig: Rig, random: Random) -> Iterator[None]:
    starts = [rig.bridged.start, lambda: rig.bridge.start(rig.bridged)]
    random.shuffle(starts)
    rig.bridge.kill()
    rig.bridged.kill()
    yield
    for start in starts:
        start()
