"""Two publishers under one name."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.chaos.faults.fault import fault
from tests.chaos.rig import Rig


@fault("second publisher of a name, the older one killed", touches={"engine"}, hold_s=4)
def older_killed(rig: Rig, random: Random) -> Iterator[None]:
    place = random.randrange(len(rig.engines))
    older = rig.engines[place]
    rig.engines[place] = rig.start_twin(older)  # of two, the newer one is believed
    yield
    older.kill()


@fault("second publisher of a name, the newer one killed", touches={"engine"}, hold_s=4)
def newer_killed(rig: Rig, random: Random) -> Iterator[None]:
    """The older one is believed after two missing heartbeats."""
    place = random.randrange(len(rig.engines))
    older = rig.engines[place]
    rig.engines[place] = newer = rig.start_twin(older)
    yield
    newer.kill()
    rig.engines[place] = older
