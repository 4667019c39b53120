"""Translation of TensorRT-LLM's polled events to events that routers can rely on."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.decoding.events import InvalidEvent
from bridge.tensorrt import PolledEvents, from_tensorrt, widest_window_of
from kv_events.log.memory import MemoryLog
from kv_events.streams import split_group
from publisher import EventPublisher, PublisherSettings
from publisher.kernels.blocks import BlockTable
from publisher.sinks.memory import MemorySink
from tests.models.stream_reader import Pages, StreamReader
from tests.rigs.bridge import CPU, GPU, NOW, on
from tests.support.engines.event_payloads import names_of

TOKENS = list(range(100, 116))
NAMES = names_of(TOKENS)
HASHES = [11, 12, 13, 14]


def block(block_hash: Any, tokens: list[int], **fields: Any) -> dict[str, Any]:
    said = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {
        "type": "stored_block",
        "block_hash": block_hash,
        "tokens": said,
        "cache_level": 0,
        "priority": 35,
        **fields,
    }


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **fields: Any) -> dict[str, Any]:
    """Return a store of blocks of four tokens. The last one may have fewer."""
    blocks = [block(name, tokens[4 * i : 4 * i + 4], **fields) for i, name in enumerate(hashes)]
    return {"type": "stored", "parent_hash": parent, "blocks": blocks}


def removed(*hashes: Any) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(hashes)}


def moved(block_hash: int, old: int, new: int) -> dict[str, Any]:
    levels = {"type": "event_diff", "old_value": old, "new_value": new}
    return {"type": "updated", "block_hash": block_hash, "cache_level": levels, "priority": None}


class Rig:
    """Passes polled events to the bridge and returns the content of the streams."""

    def __init__(self) -> None:
        settings = PublisherSettings(model="m", worker="w", block_size=4, ledger_pages=4096)
        self.polled = PolledEvents(settings, self._publisher, name_pages=4096)
        self._publishers: dict[tuple[int, str], EventPublisher] = {}
        self._views: dict[tuple[int, str], StreamReader] = {}
        self._next = 0

    def take(self, *data: dict[str, Any], **fields: Any) -> Rig:
        events = [{"event_id": self._next + i, "data": each, **fields} for i, each in enumerate(data)]
        self._next += len(events)
        self.polled.take(events)
        return self

    def drop_all_pages(self, num_events: int) -> Rig:
        self._next += num_events
        return self

    def pages(self, rank: int = 0, group: str = "") -> Pages:
        for record in self._publishers[rank, group].take_records(NOW, force=True):
            self._views[rank, group].read(record.payload)
        self._publishers[rank, group].check()
        return self._views[rank, group].pages

    def degraded_reason(self) -> str | None:
        self.pages()
        return self._views[0, ""].degraded_reason

    def _publisher(self, settings: PublisherSettings, blocks: BlockTable | None) -> EventPublisher:
        key = settings.dp_rank, split_group(settings.model)[1] or ""
        self._publishers[key] = publisher = EventPublisher(settings, MemorySink(MemoryLog()), blocks)
        self._views[key] = StreamReader()
        return publisher


def test_a_chain_of_blocks_is_named_from_its_parent_on() -> None:
    rig = Rig().take({"type": "created", "num_blocks_per_cache_level": [9, 0]}, stored(HASHES[:2], TOKENS[:8]))
    rig.take(stored(HASHES[2:], TOKENS[8:], parent=12))
    assert rig.pages() == on(GPU, NAMES)


def test_a_trailing_block_that_is_not_full_is_dropped() -> None:
    rig = Rig().take(stored(HASHES[:3], TOKENS[:10]), stored([15], TOKENS[:2]))
    assert rig.pages() == on(GPU, NAMES[:2])
    assert rig.polled.counters.partial_pages == 2


def test_a_removal_takes_blocks_off_whatever_level_they_are_on() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), moved(12, 0, 1), removed(12, 14))
    assert rig.pages() == on(GPU, [NAMES[0], NAMES[2]])


def test_an_update_moves_a_block_between_device_and_host() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), moved(12, 0, 1), moved(13, 0, 1), moved(12, 1, 0))
    assert rig.pages() == on(GPU, [NAMES[0], NAMES[1], NAMES[3]]) | on(CPU, [NAMES[2]])


def test_a_change_of_the_priority_moves_nothing() -> None:
    update = {"type": "updated", "block_hash": 12, "cache_level": None, "priority": {"old_value": 1, "new_value": 2}}
    assert Rig().take(stored(HASHES, TOKENS), update).pages() == on(GPU, NAMES)


def test_blocks_of_one_chain_may_be_on_two_levels() -> None:
    chain = stored(HASHES, TOKENS)
    chain["blocks"][2]["cache_level"] = 1
    assert Rig().take(chain).pages() == on(GPU, [NAMES[0], NAMES[1], NAMES[3]]) | on(CPU, [NAMES[2]])


def with_windows() -> Rig:
    rig = Rig()
    for window in (32, 4096):
        rig.take({"type": "created", "num_blocks_per_cache_level": [9, 0]}, window_size=window)
    return rig


def test_without_layer_groups_all_windows_must_hold_a_prefix() -> None:
    rig = with_windows().take(stored(HASHES, TOKENS), window_size=4096)
    rig.take(stored(HASHES, TOKENS), window_size=32).take(removed(13), window_size=32)
    assert rig.pages() == on(GPU, [*NAMES[:2], NAMES[3]])


def test_a_layer_group_with_a_window_has_a_stream_of_its_own() -> None:
    rig = with_windows().take(stored(HASHES, TOKENS), window_size=4096, layer_group_id=0)
    rig.take(stored(HASHES, TOKENS), window_size=32, layer_group_id=1).take(removed(13), layer_group_id=1)
    assert rig.pages() == on(GPU, NAMES)
    assert rig.pages(group="swa:31") == on(GPU, [*NAMES[:2], NAMES[3]])


def test_recurrent_states_have_a_stream_of_their_own() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), window_size=4096).take(stored(HASHES[3:], [], parent=13), window_size=-1)
    assert rig.pages() == on(GPU, NAMES)
    assert rig.pages(group="mamba") == on(GPU, NAMES[3:])


def test_layer_groups_keep_equal_hashes_apart() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), layer_group_id=0).take(stored(HASHES, TOKENS), layer_group_id=1)
    assert rig.take(removed(11), layer_group_id=0).pages() == on(GPU, NAMES[1:])
    assert rig.take(removed(12), layer_group_id=1).pages() == on(GPU, NAMES[2:])


def test_ranks_are_streams_of_their_own() -> None:
    polled = Rig()
    polled.polled.take(
        [
            {"event_id": 0, "attention_dp_rank": 0, "data": stored(HASHES, TOKENS)},
            {"event_id": 0, "attention_dp_rank": 1, "data": stored(HASHES[:1], TOKENS[:4])},
        ]
    )
    assert polled.pages(0) == on(GPU, NAMES)
    assert polled.pages(1) == on(GPU, NAMES[:1])


def test_events_that_fell_out_of_the_buffer_cost_the_pages_but_not_their_hashes() -> None:
    rig = Rig().take(stored(HASHES[:2], TOKENS[:8])).drop_all_pages(1).take(stored(HASHES[2:], TOKENS[8:], parent=12))
    assert rig.pages() == on(GPU, NAMES[2:])
    assert (rig.polled.counters.losses, rig.degraded_reason()) == (1, "batches lost")
    assert Rig().take(stored(HASHES, TOKENS)).degraded_reason() == ""


def test_an_extra_id_keeps_a_block_and_its_children_apart_from_the_plain_ones() -> None:
    rig, chain = Rig(), stored(HASHES, TOKENS)
    chain["blocks"][1]["tokens"][0]["token_extra_id"] = 77
    pages = rig.take(chain).pages()
    assert len(pages) == 4
    assert pages & on(GPU, NAMES) == on(GPU, NAMES[:1])


def test_a_multimodal_object_gives_the_name_that_vllms_identifier_gives() -> None:
    chain = stored(HASHES, TOKENS)
    chain["blocks"][1]["mm_keys"] = [{"type": "mm_key", "hash": "00000000deadbeef" + "0" * 48, "start_offset": 0}]
    assert Rig().take(chain).pages() == on(GPU, names_of(TOKENS, objects=[[], [0xDEADBEEF]]))


@pytest.mark.parametrize(
    "again", [-5, 2**64 - 5, b"x" * 24 + (2**64 - 5).to_bytes(8, "big"), "ab" * 8 + "f" * 15 + "b"]
)
def test_hashes_in_every_form_are_one(again: Any) -> None:
    assert Rig().take(stored([-5], TOKENS[:4]), removed(again)).pages() == set()


@pytest.mark.parametrize(
    "event",
    [
        {"data": {"type": "stored", "parent_hash": None, "blocks": 7}},
        {"data": stored([None], [1, 2, 3, 4])},
        {"data": stored([1], [-1, 2, 3, 4])},
        {"data": stored([1], [1, 2, 3, 2**32])},
        {"data": stored([1], [1, 2, 3, 4], cache_level=2)},
    ],
)
def test_a_store_that_makes_no_sense_is_counted_and_its_neighbours_are_taken(event: dict[str, Any]) -> None:
    assert all(isinstance(run, InvalidEvent) for run in from_tensorrt(event, 4))
    rig = Rig().take(stored(HASHES[:1], TOKENS[:4]))
    rig.polled.take([event, {"data": stored(HASHES[1:], TOKENS[4:], parent=11)}])
    assert rig.pages() == on(GPU, NAMES)
    assert rig.polled.counters.bad_events.total() == 1


@pytest.mark.parametrize(
    "event",
    [
        {},
        7,
        {"attention_dp_rank": -1, "data": removed(11)},
        {"data": None},
        {"data": {"type": "new", "block_hashes": [1]}},
        {"data": removed("zz")},
        {"data": removed(1), "window_size": "wide"},
    ],
)
def test_what_makes_no_sense_and_may_have_been_a_removal_costs_the_pages_of_before(event: Any) -> None:
    rig = Rig().take(stored(HASHES[:1], TOKENS[:4]))
    rig.polled.take([event, {"data": stored(HASHES[1:], TOKENS[4:], parent=11)}])
    assert (rig.pages(), rig.degraded_reason()) == (on(GPU, NAMES[1:]), "batches lost")
    assert rig.polled.counters.bad_events.total() == 1


def test_the_widest_window_is_that_of_all_events_so_far() -> None:
    assert widest_window_of([{"window_size": 5}, {}, {"window_size": None}, {"window_size": 9}]) == 9
    assert widest_window_of([{"window_size": 5}], 7) == 7
    assert widest_window_of([]) == 0
