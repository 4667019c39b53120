"""The answer of a group equals that of one service that holds everything, however its streams are shared out."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from api.queries.answers import general_answer, namespaces_of
from api.queries.body_formats import format_of
from api.queries.parsing import BY_ANY, decode_question
from api.shards.scatter_gather import LocalShard, ScatterGather
from api.shards.wire import ShardReply, decode_reply, decode_request, encode
from indexer.applier import Applier, DeadLetters
from indexer.consumer import Consumer
from indexer.namespaces import Namespaces
from indexer.progress import Progress
from indexer.settings import IndexerSettings
from indexer.shards.assignment import Assignment, Candidate, Member, decode_assignment, decode_candidate, share_out
from indexer.shards.assignment import encode as encode_entry
from indexer.shards.owned_partitions import copy_views
from indexer.slices import run_at_once
from indexer.snapshots.image import take, unpack
from indexer.sources.memory import MemorySource
from kv_events.digest import digest_bytes
from kv_events.hashing import namespace_seed, sequence_hashes, token_array
from kv_events.http.parsed_query import ParsedQuery
from kv_events.log.memory import MemoryLog
from kv_events.records import LogRecord
from tests.support.log.records import Stream, stored
from tests.support.log.view_facts import held_pages

SETTINGS = IndexerSettings(max_pages=2**12)
NOW = 1000.0
NUM_PARTITIONS = 4
TOKENS = list(range(1, 49))
HASHES = {size: sequence_hashes(token_array(TOKENS), size, namespace_seed(None, None)).tolist() for size in (4, 8)}
"""Block size -> the sequence hashes of the prompt."""


class Fixed:
    """A membership that never changes."""

    def __init__(self, name: str, assignment: Assignment) -> None:
        self.id, self.assignment, self.group = name, assignment, "g"
        self.lent: frozenset[int] = frozenset()
        self.may_be_replaced = False

    @property
    def wanted(self) -> frozenset[int]:
        return self.assignment.partitions_of(self.id)


class Shared:
    """A share that is up to date."""

    def __init__(self, membership: Fixed) -> None:
        self.membership = membership

    def owned(self) -> dict[int, bool]:
        return dict.fromkeys(self.membership.wanted, True)


class Near:
    """A member in this process, asked through the bytes that a connection would carry."""

    def __init__(self, member: Member, own: LocalShard) -> None:
        self.member, self.own, self.failure = member, own, ""

    async def ask(self, body: bytes) -> ShardReply:
        told: ShardReply = decode_reply(encode(await self.own.reply(decode_request(body))))
        return told


class NearPeers:
    def __init__(self, own_id: str, peers: dict[str, Near]) -> None:
        self._own_id, self._peers = own_id, peers

    def of(self, members: Sequence[Member]) -> list[Near]:
        return [self._peers[each.id] for each in members if each.id != self._own_id]


def consumer_of(*batches: tuple[int, Stream, Sequence[Any]]) -> Consumer:
    """A consumer that has applied batches: partition, stream and events of each."""
    consumer = Consumer(
        MemorySource(MemoryLog()), Applier(Namespaces(SETTINGS), DeadLetters()), SETTINGS, clock=lambda: NOW
    )
    for partition, stream, events in batches:
        record = stream.batch(*events)._replace(partition=partition)
        run_at_once(consumer.applier.apply(record, NOW - 0.25, consumer.freshness.log_read_at))
    return consumer


def worker_batches(draws: list[tuple[int, int, int, int, int]]) -> list[tuple[int, Stream, list[Any]]]:
    """(worker, rank, block size, pages, tier) -> batches. A worker's partition depends on its name alone.

    Every third worker has states at some pages, too.
    """
    streams: dict[tuple[int, int, str], tuple[Stream, list[Any]]] = {}
    for worker, rank, size, pages, tier in draws:
        for model in ("m", "m#mamba") if worker % 3 == 0 else ("m",):
            stream = Stream(f"w{worker}", model=model, dp_rank=rank, block_size=size)
            _, events = streams.setdefault((worker, rank, model), (stream, []))
            held = HASHES[size][:pages] if model == "m" else HASHES[size][:pages][-1:]
            events.append(stored((0, held), tier=tier))
    return [(key[0] % NUM_PARTITIONS, *batch) for key, batch in streams.items()]


def question(**fields: Any) -> tuple[ParsedQuery, Any]:
    return decode_question(msgspec.json.encode(fields), format_of("application/json"), BY_ANY)


_DRAWS = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.integers(0, 1),
        st.sampled_from([4, 8]),
        st.integers(1, 6) | st.just(12),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=30,
)
_QUESTIONS = st.sampled_from(
    [
        {"model_name": "m", "token_ids": TOKENS},
        {"model_name": "m", "token_ids": TOKENS, "tier_weights": [4, 3, 2, 1]},
        {"model": "m", "block_size": 8, "token_ids": TOKENS},
        {"model": "m", "block_size": 8, "token_ids": TOKENS, "hit_detail": True},
        {"model": "m", "block_size": 4, "seq_hashes": HASHES[4], "instance_id": "w1"},
        {"model": "m", "block_size": 16, "seq_hashes": [1]},
        {"model_name": "m", "seq_hashes": HASHES[8][:3]},
        {"model_name": "other", "seq_hashes": [1]},
    ]
)


@given(_DRAWS, _QUESTIONS, st.integers(1, 4))
async def test_a_joined_answer_equals_that_of_one_service(
    draws: list[tuple[int, int, int, int, int]], fields: dict[str, Any], num_members: int
) -> None:
    batches = worker_batches(draws)
    candidates = [Candidate(f"member-{i}", f"http://host-{i}:1", 0, []) for i in range(num_members)]
    assignment = share_out(candidates, range(NUM_PARTITIONS), 1)
    near = {}
    for member in assignment.members:
        own = consumer_of(*(batch for batch in batches if batch[0] in member.partitions))
        near[member.id] = Near(member, LocalShard(own, Shared(Fixed(member.id, assignment))))  # type: ignore[arg-type]
    asked, numbers = question(**fields)
    whole = consumer_of(*batches)
    try:
        expected: Any = msgspec.json.decode(
            general_answer(asked, numbers, namespaces_of(asked, whole.namespaces), whole.freshness, NOW)
        )
    except Exception as problem:  # noqa: BLE001  (compared below)
        expected = str(problem)
    for name, peer in near.items():
        gatherer = ScatterGather(peer.own, Fixed(name, assignment), NearPeers(name, near))  # type: ignore[arg-type]
        (found,), missing = await gatherer.answer([(asked, numbers)])
        assert not missing
        assert (msgspec.json.decode(found) if isinstance(found, bytes) else str(found)) == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 15))), max_size=8), st.integers(0, 16))
def test_partitions_are_shared_evenly_and_few_move(held: list[tuple[int, set[int]]], num_partitions: int) -> None:
    candidates = [Candidate(str(i), f"http://h:{i + 1}", gen, sorted(has)) for i, (gen, has) in enumerate(held)]
    assignment = share_out(candidates, range(num_partitions), 7)
    given_out = sorted(p for member in assignment.members for p in member.partitions)
    assert given_out == (list(range(num_partitions)) if candidates else [])
    sizes = [len(member.partitions) for member in assignment.members]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert assignment.generation > max((gen for gen, _ in held), default=0)
    again = [Candidate(each.id, each.url, assignment.generation, each.partitions) for each in assignment.members]
    assert share_out(again, range(num_partitions), 8).members == assignment.members


def test_an_added_member_takes_only_its_share() -> None:
    before = [Candidate("a", "http://a:1", 3, [0, 1, 2, 3]), Candidate("b", "http://b:1", 3, [4, 5, 6, 7])]
    after = share_out([*before, Candidate("c", "http://c:1", 0, [])], range(8), 4)
    assert [len(member.partitions) for member in after.members] == [3, 3, 2]
    assert after.partitions_of("a") < {0, 1, 2, 3}
    assert after.partitions_of("b") < {4, 5, 6, 7}


@given(_DRAWS)
def test_a_snapshot_of_a_partition_restores_its_views_and_no_others(
    draws: list[tuple[int, int, int, int, int]],
) -> None:
    consumer = consumer_of(*worker_batches(draws))
    source = consumer.namespaces
    for partition in range(NUM_PARTITIONS):
        own = [view for view in source.views if view.partition == partition]
        copies = Namespaces(SETTINGS)
        run_at_once(copy_views(own, copies, partition))
        loaded = unpack(b"".join(run_at_once(take(copies, {partition: 7}, NOW)).pack()), SETTINGS)
        for view in loaded.namespaces.views:
            view.last_batch_tick = 5.0
        target = Namespaces(SETTINGS)
        run_at_once(copy_views(loaded.namespaces.views, target, partition))
        assert loaded.positions == {partition: 7}
        assert {facts(view) for view in target.views} == {facts(view) for view in own}
        assert all(view.last_batch_tick == 5.0 and view.partition == partition for view in target.views)
        for namespace in target:
            namespace.index.check()


def facts(view: Any) -> tuple[object, ...]:
    pages, digest = frozenset(held_pages(view).items()), digest_bytes(view.index.digest(view.number))
    return view.stream, view.epoch, view.next_seq, view.state, view.stale_reason, digest, pages


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
    assert decode_assignment(encode_entry(with_stranger)) == with_stranger
    assert sorted(with_stranger.owners()) == [0, 1, 2, 3]


@pytest.mark.parametrize("generation", [-1, 2**53, 2**64 - 1])
def test_other_generations_are_not_read(generation: int) -> None:
    assert decode_candidate(encode_entry(candidate("a", generation))) is None
    assert decode_candidate(encode_entry(candidate("a", NOW_MS))) == candidate("a", NOW_MS)


def test_two_members_with_one_id_leave_no_partition_without_a_member() -> None:
    shared = share_out([candidate("a"), candidate("a", url="http://other:1"), candidate("b")], range(5), NOW_MS)
    assert sorted(shared.owners()) == [0, 1, 2, 3, 4]
    assert [member.id for member in shared.members] == ["a", "b"]
