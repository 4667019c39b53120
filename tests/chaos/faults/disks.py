"""Disks that are full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from random import Random

from tests.chaos.faults.fault import fault
from tests.chaos.rig import Rig, Service

_ROOM_BYTES = 4096


@fault("disk of snapshots and recording full", touches={"service"}, hold_s=4)
def disk_full(rig: Rig, random: Random) -> Iterator[None]:
    service = rig.services[0]
    limits = _limit(service)
    yield
    resource.prlimit(service.pid, resource.RLIMIT_FSIZE, limits)


@fault("service killed while its disk is full", touches={"service"})
def killed_with_full_disk(rig: Rig, random: Random) -> Iterator[None]:
    service = rig.services[0]
    _limit(service)
    yield
    service.kill()
    service.start()


def _limit(service: Service) -> tuple[int, int]:
    """Let no file of the service grow beyond a few KiB, as if its disk were full. Returns the limits before."""
    return resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (_ROOM_BYTES, resource.RLIM_INFINITY))
