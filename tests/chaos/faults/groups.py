"""Faults of the members of a shard group."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.chaos.faults.fault import fault
from tests.chaos.rig import Rig


@fault("group member killed", touches={"group"})
def member_killed(rig: Rig, random: Random) -> Iterator[None]:
    member = random.choice(rig.members)
    member.kill()
    yield
    member.start()


@fault("group member killed for 12 s", touches={"group"}, hold_s=12)
def member_away(rig: Rig, random: Random) -> Iterator[None]:
    """The other one takes its partitions over."""
    member = random.choice(rig.members)
    member.kill()
    yield
    member.start()


@fault("group member stopped for 3 s", touches={"group"}, hold_s=3)
def member_paused(rig: Rig, random: Random) -> Iterator[None]:
    """Kafka keeps it in the group."""
    member = random.choice(rig.members)
    member.pause()
    yield
    member.resume()


@fault("group member stopped for 15 s", touches={"group"}, hold_s=15)
def member_stopped(rig: Rig, random: Random) -> Iterator[None]:
    """Kafka removes it from the group."""
    member = random.choice(rig.members)
    member.pause()
    yield
    member.resume()


@fault("group member added", touches={"group"}, hold_s=8)
def member_added(rig: Rig, random: Random) -> Iterator[None]:
    """It gets partitions, and leaves when the fault ends."""
    added = rig.start_further_member()
    yield
    added.terminate()
    added.close()


@fault("all group members killed", touches={"group"}, hold_s=1)
def all_members_killed(rig: Rig, random: Random) -> Iterator[None]:
    for member in rig.members:
        member.kill()
    yield
    for member in rig.members:
        member.launch()
    for member in rig.members:
        member.wait_until_it_listens()
