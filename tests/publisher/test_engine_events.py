"""Conversion of records to the engines' own events, which the bridge's decoder and the tests read back."""

import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from kv_events.hashing import namespace_seed, sequence_hashes, token_array
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent, StorageMedium
from publisher.sinks.engine_events import Encoding, EngineEvents
from tests.rigs.bridge import Rig
from tests.rigs.publisher import NOW, make_publisher
from tests.support.engines.event_payloads import names_of

TOKENS = list(range(1, 13))
CLEARED = ["AllBlocksCleared"]


class Stream:
    """A publisher of one worker, and the events that readers of the engines' protocol receive."""

    def __init__(self, encoding: Encoding = "array", **settings: Any) -> None:
        self.publisher = make_publisher(with_tokens=True, **settings)
        self.encoder = EngineEvents(encoding)
        self._now = NOW

    def batches(self, *events: EngineEvent) -> list[bytes]:
        self.publisher.publish(events)
        self._now += 10
        records = self.publisher.take_records(self._now, force=True)
        return [payload for record in records if (payload := self.encoder.encode(record.payload)) is not None]

    def events(self, *events: EngineEvent) -> list[Any]:
        return [event for batch in self.batches(*events) for event in msgspec.msgpack.decode(batch)[1]]


def begun(encoding: Encoding = "array", **settings: Any) -> Stream:
    stream = Stream(encoding, **settings)
    stream.batches()
    return stream


def store(names: list[int], tokens: list[Any] = TOKENS, parent: int | None = None, **fields: Any) -> BlockStored:
    return BlockStored(names, parent, tokens, 4, **fields)


def test_the_first_batch_states_that_nothing_is_held_and_heartbeats_contain_nothing() -> None:
    stream = Stream()
    assert stream.events() == [CLEARED]
    assert stream.batches() == []


def test_what_was_published_before_anything_was_sent_has_its_tokens() -> None:
    assert Stream().events(store([7, 8, 9])) == [
        CLEARED,
        ["BlockStored", names_of(TOKENS), None, TOKENS, 4, None, "GPU"],
    ]


def test_a_batch_has_time_events_and_rank() -> None:
    stream = begun(dp_rank=3)
    timestamp, events, rank = msgspec.msgpack.decode(stream.batches(store([7, 8, 9]))[0])
    assert (timestamp, len(events), rank) == (NOW + 20, 1, 3)


def test_an_array_has_the_fields_in_the_engines_order_and_ids_are_sequence_hashes() -> None:
    names = names_of(TOKENS)
    assert begun().events(store([7, 8, 9], medium=StorageMedium.CPU)) == [
        ["BlockStored", names, None, TOKENS, 4, None, "CPU_PINNED"]
    ]


def test_a_map_names_them() -> None:
    assert begun("map").events(store([7, 8, 9]), BlockRemoved([8]), AllBlocksCleared()) == [
        {
            "type": "BlockStored",
            "block_hashes": names_of(TOKENS),
            "parent_block_hash": None,
            "token_ids": TOKENS,
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": names_of(TOKENS)[1:2], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]


def test_a_page_behind_another_names_it_as_its_parent() -> None:
    stream = begun()
    stream.events(store([7, 8], TOKENS[:8]))
    names = names_of(TOKENS)
    assert stream.events(store([9], TOKENS[8:], parent=8)) == [
        ["BlockStored", names[2:], names[1], TOKENS[8:], 4, None, "GPU"]
    ]


def test_pages_of_token_pairs_are_reported_as_pairs() -> None:
    pairs = list(pairwise(TOKENS[:9]))
    [event] = begun().events(store([7, 8], pairs))
    assert event[1] == names_of(TOKENS[:9], is_bigram=True)
    assert event[3] == [list(pair) for pair in pairs]


def test_a_salt_is_sent_so_that_readers_find_the_pages() -> None:
    assert begun().events(store([7, 8, 9], extra_key="s"))[0][7] == {"cache_salt": "s"}
    mapped = begun("map").events(store([7, 8, 9], extra_key="s"))[0]
    assert (mapped["cache_salt"], mapped["block_hashes"]) == ("s", names_of(TOKENS, salt="s"))


def test_an_extra_key_that_was_hashed_as_an_adapter_is_reported_as_one() -> None:
    names = sequence_hashes(token_array(TOKENS), 4, namespace_seed(lora_name="ad")).tobytes()
    event = store([7, 8, 9], extra_key="ad", sequence_hashes=names)
    assert begun().events(event)[0][7] == "ad"
    assert begun("map").events(event)[0]["lora_name"] == "ad"


def test_pages_that_tokens_do_not_name_are_left_out_with_those_behind_them() -> None:
    stream = begun()
    wrong = names_of(TOKENS[:4])[0].to_bytes(8, "little") + bytes([1] * 8 + [2] * 8)
    assert stream.events(store([7, 8, 9], sequence_hashes=wrong)) == [
        ["BlockStored", names_of(TOKENS[:4]), None, TOKENS[:4], 4, None, "GPU"]
    ]
    assert stream.encoder.num_omitted == 2


def test_a_page_whose_parent_is_not_known_is_not_reported_as_the_first_of_a_prompt() -> None:
    stream = begun()
    names = b"".join(name.to_bytes(8, "little") for name in names_of(TOKENS)[1:])
    assert stream.events(store([8, 9], TOKENS[4:], parent=7, sequence_hashes=names)) == []
    assert stream.encoder.num_omitted == 2


def test_pages_without_tokens_are_left_out() -> None:
    stream = begun()
    names = b"".join(name.to_bytes(8, "little") for name in names_of(TOKENS))
    assert stream.events(store([7, 8, 9], [], sequence_hashes=names)) == []
    assert stream.encoder.num_omitted == 3


def test_what_is_resent_leads_to_removals_only() -> None:
    stream = begun(queue_pages=5)
    stream.events(store([7, 8, 9]), store([7, 8], TOKENS[:8], medium=StorageMedium.CPU))
    other = [list(range(start, start + 4)) for start in range(100, 124, 4)]
    changes: list[EngineEvent] = [BlockRemoved([7, 8, 9]), store([7], TOKENS[:4]), *(store([t[0]], t) for t in other)]
    events = stream.events(*changes)  # too much for the queue
    assert stream.publisher.stats().dropped > 0
    assert events == [["BlockRemoved", sorted(names_of(TOKENS)[1:]), "GPU"]]
    assert stream.encoder.num_omitted == len(other)
    assert stream.events(BlockRemoved([7, 100])) == [["BlockRemoved", names_of(TOKENS[:4]), "GPU"]]


@pytest.mark.parametrize("encoding", ["array", "map"])
@pytest.mark.parametrize("seed", range(5))
def test_a_bridge_that_reads_them_knows_what_the_worker_holds(encoding: Encoding, seed: int) -> None:
    rng = random.Random(seed)
    stream, rig = Stream(encoding), Rig(block_size=4)
    pages: set[tuple[int, int]] = set()
    prompts = [(number, [rng.randrange(2**32) for _ in range(4 * rng.randint(1, 6))]) for number in range(20)]
    media = list(StorageMedium)
    for _ in range(60):
        number, tokens = rng.choice(prompts)
        tier, salt = rng.randrange(4), rng.choice([None, "s"]) if number % 2 else None
        blocks = [100 * number + place for place in range(len(tokens) // 4)]
        names = names_of(tokens, salt=salt)
        kind = rng.random()
        if kind < 0.6:
            change: EngineEvent = store(blocks, tokens, medium=media[tier], extra_key=salt)
            pages |= {(tier, name) for name in names}
        elif kind < 0.97:
            some = sorted(rng.sample(range(len(blocks)), rng.randint(1, len(blocks))))
            change = BlockRemoved([blocks[place] for place in some], media[tier], salt)
            pages -= {(tier, names[place]) for place in some}
        else:
            change = AllBlocksCleared()
            pages.clear()
        for payload in stream.batches(change):
            rig.take_payload(payload)
        assert rig.pages == pages
    assert stream.encoder.num_omitted == 0
