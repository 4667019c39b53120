"""The faults of a chaos run, by name, and the contract of a fault."""

import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from random import Random
from typing import NamedTuple, TypeAlias

from tests.chaos.engine import Engine
from tests.chaos.rig import SNAPSHOT_INTERVAL_S, Rig, Service
from tests.support.servers.tcp_proxy import TcpProxy

_STARTING_S = 2.0
_MID_BATCH_PAGES = 20_000
_BURST_PAGES = 500_000
_CLOCK_STEPS_S = (-3600, 3600)
_ROOM_BYTES = 4096
_LINKS = {
    "ENGINES": ("engines and broker", "broker"),
    "SERVICES": ("services and broker", "broker"),
    "REDIS": ("services and Redis", "redis"),
}
_SLOW_BYTES_PER_S = 20_000
_FLAPS = 10


Course: TypeAlias = Callable[[Rig, Random], Iterator[None]]
"""A generator function: it injects the fault, yields once, and heals it. Everything is drawn from `Random`."""


class Fault(NamedTuple):
    name: str
    course: Course
    touches: frozenset[str]
    """Parts that it breaks, or that it needs. Two faults overlap only if they touch different parts."""
    within_s: float
    """Seconds from the end of the fault in which all views must be right."""
    hold_s: float
    """Seconds for which the fault lasts."""


FAULTS: dict[str, Fault] = {}
"""All faults, by name."""


def fault(
    name: str, *, touches: Iterable[str], within_s: float = 10.0, hold_s: float = 2.0
) -> Callable[[Course], Course]:
    """Register a fault. It leaves as many engines and services running as it found.

    The time until all views are right is counted from its return.
    """

    def register(course: Course) -> Course:
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, course, frozenset(touches), within_s, hold_s)
        return course

    return register


# --- one part breaks and is healed ---


def _broken(parts: str, begin: str, end: str) -> Course:
    """parts: attribute of the rig, one part or a list to draw from. begin, end: methods that break and heal it."""

    def course(rig: Rig, random: Random) -> Iterator[None]:
        found = getattr(rig, parts)
        part = random.choice(found) if isinstance(found, list) else found
        getattr(part, begin)()
        yield
        getattr(part, end)()

    return course


for _name, _touches, _parts, _begin, _end, _hold_s, _within_s in (
    ("engine killed for 12 s, restarted", "engine", "engines", "kill", "start", 12, 10),
    ("engine stopped for 6 s", "engine", "engines", "pause", "resume", 6, 10),
    ("engine behind the bridge restarted", "bridge", "bridged", "kill", "start", 2, 10),
    ("bridge killed while its engine goes on", "bridge", "bridge", "kill", "start", 3, 10),
    ("bridge killed for 12 s", "bridge", "bridge", "kill", "start", 12, 10),
    ("service stopped for 15 s", "service", "services", "pause", "resume", 15, 10),
    ("group member killed", "group", "members", "kill", "start", 2, 10),
    ("group member killed for 12 s", "group", "members", "kill", "start", 12, 10),  # the other takes its partitions
    ("group member stopped for 3 s", "group", "members", "pause", "resume", 3, 10),  # Kafka keeps it in the group
    ("group member stopped for 15 s", "group", "members", "pause", "resume", 15, 10),  # Kafka removes it
    ("broker killed for 2 s", "broker", "broker", "kill", "restart", 2, 30),
    ("broker killed until queues overflow", "broker", "broker", "kill", "restart", 12, 30),
    ("broker stopped for 15 s", "broker", "broker", "stop", "resume", 15, 30),
    ("Redis killed, back empty", "redis", "redis", "kill", "restart", 2, 10),
):
    fault(_name, touches={_touches}, within_s=_within_s, hold_s=_hold_s)(_broken(_parts, _begin, _end))


def _all_killed(parts: str) -> Course:
    def course(rig: Rig, random: Random) -> Iterator[None]:
        services: list[Service] = getattr(rig, parts)
        for service in services:
            service.kill()
        yield
        for service in services:
            service.launch()
        for service in services:
            service.wait_until_it_listens()

    return course


fault("all services killed", touches={"service"}, hold_s=1)(_all_killed("services"))
fault("all group members killed", touches={"group"}, hold_s=1)(_all_killed("members"))


def _clock_stepped(parts: str) -> Course:
    def course(rig: Rig, random: Random) -> Iterator[None]:
        clock = random.choice(getattr(rig, parts)).clock
        clock.step(random.choice(_CLOCK_STEPS_S))
        yield
        clock.step(0)

    return course


fault("clock of an engine stepped by an hour", touches={"engine"}, hold_s=3)(_clock_stepped("engines"))
fault("clock of a service stepped by an hour", touches={"service"}, hold_s=3)(_clock_stepped("services"))


# --- engines and bridges ---


@fault("engine and bridge restarted", touches={"bridge"})
def both_killed(rig: Rig, random: Random) -> Iterator[None]:
    starts = [rig.bridged.start, lambda: rig.bridge.start()]
    random.shuffle(starts)
    rig.bridge.kill()
    rig.bridged.kill()
    yield
    for start in starts:
        start()


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


def _burst_until_killed(engine: Engine) -> None:
    with suppress(EOFError, ValueError):  # it is killed meanwhile
        engine.burst(_MID_BATCH_PAGES)


@fault("engine restarted with a clock set back by an hour", touches={"engine"})
def engine_restarted(rig: Rig, random: Random) -> Iterator[None]:
    """Its epoch is smaller than before, so it is believed after two missing heartbeats."""
    engine = random.choice(rig.engines)
    engine.kill()
    engine.clock.set(-3600)
    yield
    engine.start()
    engine.clock.step(0)


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


# --- services ---


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


@fault("service restarted with a clock wrong by an hour", touches={"service"}, hold_s=3)
def service_restarted(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.kill()
    service.clock.set(random.choice(_CLOCK_STEPS_S))
    service.start()
    yield
    service.clock.step(0)


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


@fault("group member added", touches={"group"}, hold_s=8)
def member_added(rig: Rig, random: Random) -> Iterator[None]:
    """It gets partitions, and leaves when the fault ends."""
    added = rig.start_further_member()
    yield
    added.terminate()
    added.close()


# --- the network ---


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
