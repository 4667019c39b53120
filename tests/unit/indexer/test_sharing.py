"""How partitions are shared out among members, and what a member has caught up with."""

from __future__ import annotations

import pytest

from indexer.progress import Progress
from indexer.shards.assignment import Candidate, decode_assignment, decode_candidate, encode, share_out
from kv_events.records import LogRecord

NOW_MS = 1_800_000_000_000


def candidate(name: str, generation: int = 0, url: str = "") -> Candidate:
    return Candidate(name, url or f"http://{name}:1", generation, [])


def test_a_partition_that_is_given_up_does_not_delay_the_others() -> None:
    progress = Progress()
    progress.start({0: 0, 1: 0}, {0: 1, 1: 9})
    progress.advance(LogRecord(0, 0, 0, b"", b""))
    assert not progress.catches_up()
    progress.remove(1)
    assert progress.catches_up()
    assert progress.lag() == 0


@pytest.mark.parametrize("generation", [2**53 - 1, NOW_MS + 10**9])
def test_a_generation_of_the_far_future_does_not_stay(generation: int) -> None:
    with_stranger = share_out([candidate("a", NOW_MS - 5), candidate("stranger", generation)], range(4), NOW_MS)
    assert (with_stranger.generation, with_stranger.before) == (NOW_MS, NOW_MS - 5)
    assert decode_assignment(encode(with_stranger)) == with_stranger
    assert sorted(with_stranger.owners()) == [0, 1, 2, 3]


@pytest.mark.parametrize("generation", [-1, 2**53, 2**64 - 1])
def test_other_generations_are_not_read(generation: int) -> None:
    assert decode_candidate(encode(candidate("a", generation))) is None
    assert decode_candidate(encode(candidate("a", NOW_MS))) == candidate("a", NOW_MS)


def test_two_members_with_one_id_leave_no_partition_without_a_member() -> None:
    shared = share_out([candidate("a"), candidate("a", url="http://other:1"), candidate("b")], range(5), NOW_MS)
    assert sorted(shared.owners()) == [0, 1, 2, 3, 4]
    assert [member.id for member in shared.members] == ["a", "b"]
