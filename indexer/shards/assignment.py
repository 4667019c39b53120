"""The assignment of partitions to members, and what members tell each other through Kafka's group protocol."""

from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec

from indexer.shards.settings import MAX_URL_LENGTH, is_member_url

MAX_MEMBERS = 64
"""Bound on the members of an assignment. Further ones only ask these."""
MAX_PARTITIONS = 4096
"""Bound on the partitions of a topic that a group shares."""

_MAX_BYTES = 2**20
_MAX_AHEAD_MS = 24 * 3600 * 1000
"""Generations are times at least. One that is so far in the future comes from a wrong clock or from a stranger."""

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Url = Annotated[str, msgspec.Meta(max_length=MAX_URL_LENGTH)]
_Generation = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Partition = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Partitions = Annotated[list[_Partition], msgspec.Meta(max_length=MAX_PARTITIONS)]


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """What a member says of itself when it joins the group."""

    id: _Id
    """Chosen anew at each start of a process."""
    url: _Url
    generation: _Generation
    """That of the newest assignment that it knows. 0: none."""
    held: _Partitions
    """Partitions whose views it keeps."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One member with its partitions."""

    id: _Id
    url: _Url
    partitions: _Partitions


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Which member keeps the views of which partitions. All members get the same one."""

    generation: _Generation
    """Grows with each assignment of a group."""
    before: _Generation
    """Generation of the newest assignment that any member knew."""
    members: list[Member]

    def partitions_of(self, member: str) -> frozenset[int]:
        """Return the partitions of a member. Empty if it is not in the group."""
        return frozenset(p for each in self.members if each.id == member for p in each.partitions)

    def owners(self) -> dict[int, Member]:
        return {partition: member for member in self.members for partition in member.partitions}

    def has(self, member: str) -> bool:
        return any(each.id == member for each in self.members)


NOBODY = Assignment(0, 0, [])
"""The assignment before the first one."""

_encoder = msgspec.msgpack.Encoder()
_candidates = msgspec.msgpack.Decoder(Candidate)
_assignments = msgspec.msgpack.Decoder(Assignment)


def encode(told: Candidate | Assignment) -> bytes:
    return _encoder.encode(told)


def decode_candidate(data: bytes) -> Candidate | None:
    """Return what a member says of itself, or None if it cannot be read: other software, or another version."""
    try:
        found = _candidates.decode(data[: _MAX_BYTES + 1])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if is_member_url(found.url) else None


def decode_assignment(data: bytes) -> Assignment | None:
    """Return an assignment, or None if it cannot be read."""
    try:
        found = _assignments.decode(data[: _MAX_BYTES + 1])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if all(is_member_url(member.url) for member in found.members) else None


def share_out(candidates: Collection[Candidate], partitions: Collection[int], now_ms: int) -> Assignment:
    """Share the partitions out evenly, so that as few as possible move.

    now_ms: milliseconds since 1970, so that generations also grow when a whole group restarts.
    """

    def generation(each: Candidate) -> int:
        return each.generation if each.generation <= now_ms + _MAX_AHEAD_MS else 0

    before = max(map(generation, candidates), default=0)
    # who holds most stays; among several that hold a partition, the one with the newest assignment keeps it
    ordered = sorted(candidates, key=lambda each: (-generation(each), -len(each.held), each.id))
    by_id = {each.id: each for each in reversed(ordered)}  # ids are chosen at random: two that are equal are hostile
    chosen = [each for each in ordered if by_id[each.id] is each][:MAX_MEMBERS]
    shares = _shares(chosen, sorted(partitions)[:MAX_PARTITIONS])
    members = [Member(each.id, each.url, sorted(shares[each.id])) for each in chosen]
    return Assignment(max(before + 1, now_ms), before, sorted(members, key=lambda member: member.id))


def _shares(owners: list[Candidate], partitions: list[int]) -> Mapping[str, set[int]]:
    """Return member -> its partitions."""
    if not owners:
        return {}
    least, num_larger = divmod(len(partitions), len(owners))
    shares: dict[str, set[int]] = {each.id: set() for each in owners}
    free = set(partitions)
    for each in owners:
        shares[each.id] = set(sorted(free & set(each.held))[: least + 1])
        free -= shares[each.id]
    larger = sorted((each.id for each in owners), key=lambda name: -len(shares[name]))[:num_larger]
    for name, share in shares.items():
        most = least + (name in larger)
        while len(share) > most:
            moved = max(share)
            share.remove(moved)
            free.add(moved)
    for name, share in shares.items():
        wanted = least + (name in larger) - len(share)
        for partition in sorted(free)[:wanted]:
            share.add(partition)
            free.remove(partition)
    return shares
