"""Faults of Kafka and of Redis."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.chaos.faults.fault import fault
from tests.chaos.rig import Rig


@fault("broker killed for 2 s", touches={"broker"}, within_s=30)
def broker_killed(rig: Rig, random: Random) -> Iterator[None]:
    rig.broker.kill()
    yield
    rig.broker.restart()


@fault("broker killed until queues overflow", touches={"broker"}, within_s=30, hold_s=12)
def broker_lost(rig: Rig, random: Random) -> Iterator[None]:
    rig.broker.kill()
    yield
    rig.broker.restart()


@fault("broker stopped for 15 s", touches={"broker"}, within_s=30, hold_s=15)
def broker_stopped(rig: Rig, random: Random) -> Iterator[None]:
    rig.broker.stop()
    yield
    rig.broker.resume()


@fault("Redis killed, back empty", touches={"redis"})
def redis_killed(rig: Rig, random: Random) -> Iterator[None]:
    rig.redis.kill()
    yield
    rig.redis.restart()
