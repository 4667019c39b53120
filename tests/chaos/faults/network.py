"""Faults of the network between engines and broker, services and broker, services and Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random

from tests.chaos.faults.fault import Course, fault
from tests.chaos.rig import Rig
from tests.support.servers.tcp_proxy import TcpProxy

_LINKS = {
    "ENGINES": ("engines and broker", "broker"),
    "SERVICES": ("services and broker", "broker"),
    "REDIS": ("services and Redis", "redis"),
}
_SLOW_BYTES_PER_S = 20_000
_FLAPS = 10


def _lost(name: str, loses: Callable[[TcpProxy], None]) -> Course:
    def course(rig: Rig, random: Random) -> Iterator[None]:
        loses(rig.links[name])
        yield
        rig.links[name].heal()

    return course


def _flapping(name: str) -> Course:
    def course(rig: Rig, random: Random) -> Iterator[None]:
        for _ in range(_FLAPS):
            random.choice([TcpProxy.cut, TcpProxy.blackhole])(rig.links[name])
            time.sleep(random.uniform(0, 0.4))
            rig.links[name].heal()
            time.sleep(random.uniform(0, 0.4))
        yield

    return course


def _slow(link: TcpProxy) -> None:
    link.slow(_SLOW_BYTES_PER_S)


for _name, (_ends, _part) in _LINKS.items():
    fault(f"network cut between {_ends}", touches={_part}, hold_s=3)(_lost(_name, TcpProxy.cut))
    fault(f"network silent for 12 s between {_ends}", touches={_part}, hold_s=12)(_lost(_name, TcpProxy.blackhole))
    fault(f"network flapping between {_ends}", touches={_part}, hold_s=0)(_flapping(_name))
    fault(f"network slow between {_ends}", touches={_part}, hold_s=3)(_lost(_name, _slow))
