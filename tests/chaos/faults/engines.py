"""Faults of engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from random import Random

from tests.chaos.engine import Engine
from tests.chaos.faults.fault import fault
from tests.chaos.rig import Rig

_MID_BATCH_PAGES = 20_000


@fault("engine killed mid-batch, restarted", touches={"engine"}, hold_s=0)
def engine_killed(rig: Rig, random: Random) -> Iterator[None]:
    engine = random.choice(rig.engines)
    burst = threading.Thread(target=_burst_until_killed, args=(engine,))
    burst.start()
    burst.join(timeout=random.uniform(0.05, 0.5))
    engine.kill()
    burst.join()
    yield
    engine.start()


@fault("engine killed for 12 s, restarted", touches={"engine"}, hold_s=12)
def engine_away(rig: Rig, random: Random) -> Iterator[None]:
    engine = random.choice(rig.engines)
    engine.kill()
    yield
    engine.start()


@fault("engine stopped for 6 s", touches={"engine"}, hold_s=6)
def engine_stopped(rig: Rig, random: Random) -> Iterator[None]:
    engine = random.choice(rig.engines)
    engine.pause()
    yield
    engine.resume()


def _burst_until_killed(engine: Engine) -> None:
    with suppress(EOFError, ValueError):  # it is killed meanwhile
        engine.burst(_MID_BATCH_PAGES)
