"""Translation of engine events to events that routers can rely on, with each pitfall of the engines' protocols."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.bridge.rig import CPU, DISK, EXTERNAL, GPU, Rig, on
from tests.support.engines.event_payloads import cleared, names_of, removed, stored

TOKENS = list(range(100, 116))
NAMES = names_of(TOKENS)
HASHES = [11, 12, 13, 14]


def of_group(number: int, kind: str, window: int | None = None) -> dict[str, Any]:
    more = {} if window is None else {"kv_cache_spec_sliding_window": window}
    return {"group_idx": number, "kv_cache_spec_kind": kind, **more}


def test_a_captured_event_of_vllm_is_taken_as_it_is() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [15760518052499183552],
        "parent_block_hash": None,
        "token_ids": list(range(16)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    data = msgspec.msgpack.encode([1789095808.83, [event], 0])
    rig = Rig().take_payload(data)
    assert rig.pages == on(GPU, names_of(list(range(16)), 16))
    assert rig.translator.block_size == 16


@pytest.mark.parametrize("form", ["array", "array with nils", "map"])
@pytest.mark.parametrize("batch", ["array", "pair", "map"])
def test_both_event_encodings_and_all_batch_shapes_are_detected(form: Any, batch: Any) -> None:
    events = (stored(HASHES, TOKENS, medium="GPU"), removed(HASHES[3:], "GPU"))
    assert Rig().take(*events, form=form, batch=batch).pages == on(GPU, NAMES[:3])


@pytest.mark.parametrize(
    "names_again",
    [
        [-1, -(2**63), 2**63 - 1, 5],
        [2**64 - 1, 2**63, 2**63 - 1, 5],
        [b"\xff" * 8, b"x" * 24 + b"\x80" + b"\0" * 7, b"\x7f" + b"\xff" * 7, b"\0" * 31 + b"\5"],
        [b"\xff" * 32, 2**63, 2**63 - 1, b"\5"],
    ],
    ids=["signed", "unsigned", "bytes", "mixed"],
)
def test_hashes_signed_unsigned_and_as_bytes_are_one_and_the_same(names_again: list[Any]) -> None:
    rig = Rig().take(stored([-1, -(2**63), 2**63 - 1, 5], TOKENS))
    assert rig.pages == on(GPU, NAMES)
    assert rig.take(stored([77], TOKENS[:4], parent=names_again[3])).pages == on(
        GPU, [*NAMES, names_of(TOKENS + TOKENS[:4])[4]]
    )
    assert rig.take(removed([*names_again, 77])).pages == set()


def test_an_absent_medium_is_the_device() -> None:
    assert Rig().take(stored(HASHES, TOKENS)).pages == on(GPU, NAMES)


def test_an_unknown_medium_is_not_the_device_and_is_counted() -> None:
    rig = Rig().take(stored(HASHES, TOKENS, medium="FLOPPY"), removed([12], "FLOPPY"))
    assert rig.pages == set()
    assert rig.counters.unknown_media == {"FLOPPY": 5}


def test_pages_on_an_unknown_medium_still_name_their_children() -> None:
    rig = Rig().take(stored(HASHES[:2], TOKENS[:8], medium="FLOPPY"), stored(HASHES[2:], TOKENS[8:], parent=12))
    assert rig.pages == on(GPU, NAMES[2:])


def test_what_is_on_a_remote_machine_is_external() -> None:
    assert Rig().take(stored(HASHES, TOKENS, medium="STORAGE", locality="REMOTE"), form="map").pages == on(
        EXTERNAL, NAMES
    )


def test_a_parent_may_be_on_another_tier() -> None:
    rig = Rig().take(stored(HASHES[:2], TOKENS[:8], medium="CPU"), stored(HASHES[2:], TOKENS[8:], parent=12))
    assert rig.pages == on(CPU, NAMES[:2]) | on(GPU, NAMES[2:])


def test_a_parent_may_be_of_an_earlier_life() -> None:
    rig = Rig().take(stored(HASHES[:2], TOKENS[:8]), removed(HASHES[:2]), stored(HASHES[2:], TOKENS[8:], parent=12))
    assert rig.pages == on(GPU, NAMES[2:])


def test_a_parent_that_was_never_seen_leaves_its_children_out() -> None:
    rig = Rig().take(stored(HASHES[2:], TOKENS[8:], parent=12), stored([1], TOKENS[:4]))
    assert rig.pages == on(GPU, NAMES[:1])
    assert rig.counters.unknown_parents == 2


def test_children_wait_for_nothing_but_a_later_store_of_their_own_brings_them_in() -> None:
    rig = Rig().take(stored(HASHES[2:], TOKENS[8:], parent=12))
    rig.take(stored(HASHES[:2], TOKENS[:8]), stored(HASHES[2:], TOKENS[8:], parent=12))
    assert rig.pages == on(GPU, NAMES)


def test_a_store_without_tokens_states_that_a_known_page_is_on_one_more_medium() -> None:
    rig = Rig().take(stored(HASHES, TOKENS))
    rig.take(stored(HASHES[1:3], [], 0, medium="CPU"), removed(HASHES))
    assert rig.pages == on(CPU, NAMES[1:3])


def test_a_page_may_be_offloaded_after_it_left_the_device() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), removed(HASHES), stored([13], [], 0, medium="STORAGE"))
    assert rig.pages == on(DISK, NAMES[2:3])


def test_a_store_without_tokens_of_an_unknown_page_is_counted() -> None:
    rig = Rig(block_size=4).take(stored([99, 98], [], 0, medium="CPU"))
    assert rig.pages == set()
    assert rig.counters.unresolved_pages == 2


def test_removing_an_inner_page_leaves_its_descendants() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), removed([12]))
    assert rig.pages == on(GPU, [NAMES[0], NAMES[2], NAMES[3]])
    assert rig.take(stored([12], TOKENS[4:8], parent=11)).pages == on(GPU, NAMES)


def test_stores_of_known_and_removals_of_unknown_pages_are_normal() -> None:
    rig = Rig().take(removed([55]), stored(HASHES, TOKENS), stored(HASHES, TOKENS), removed([55], "DISK"))
    assert rig.pages == on(GPU, NAMES)
    assert rig.counters.bad_events == {}


def test_a_page_stays_until_the_last_copy_is_removed() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), stored(HASHES, TOKENS), removed([14]))
    assert rig.pages == on(GPU, NAMES)
    assert rig.take(removed([14]), removed([14])).pages == on(GPU, NAMES[:3])
    assert rig.take(removed([13, 13])).pages == on(GPU, NAMES[:2])


def test_copies_of_another_medium_or_group_are_counted_apart() -> None:
    group = of_group(0, "full_attention")
    rig = Rig().take(
        stored(HASHES, TOKENS, **group), stored(HASHES, TOKENS, **group), stored(HASHES, [], 0, medium="CPU", **group)
    )
    assert rig.take(removed(HASHES, "CPU", group_idx=0)).pages == on(GPU, NAMES)
    assert rig.take(removed(HASHES, "GPU", group_idx=0)).pages == on(GPU, NAMES)
    assert rig.take(removed(HASHES, "GPU", group_idx=0)).pages == set()


def test_a_clear_removes_all_copies() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), stored(HASHES, TOKENS), cleared(), stored(HASHES, TOKENS))
    assert rig.take(removed(HASHES)).pages == set()


@pytest.mark.parametrize("medium", ["CPU_PINNED", "DISK"])
def test_engines_without_groups_repeat_stores_behind_the_device(medium: str) -> None:
    rig = Rig().take(stored(HASHES, TOKENS, medium=medium), stored(HASHES, TOKENS, medium=medium))
    assert rig.take(removed([14], medium)).pages == on(DISK if medium == "DISK" else CPU, NAMES[:3])


def test_copies_are_not_counted_if_the_registration_says_so() -> None:
    rig = Rig(count_copies=False).take(stored(HASHES, TOKENS), stored(HASHES, TOKENS))
    assert rig.take(removed([14])).pages == on(GPU, NAMES[:3])


def test_a_removal_means_one_medium() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), stored(HASHES, [], 0, medium="CPU"), stored(HASHES, [], 0, medium="DISK"))
    rig.take(removed(HASHES[:2], "CPU_PINNED"), removed(HASHES[:1]))
    assert rig.pages == on(GPU, NAMES[1:]) | on(CPU, NAMES[2:]) | on(DISK, NAMES)


def test_everything_cleared_empties_all_media_and_hashes_stay() -> None:
    rig = Rig().take(stored(HASHES, TOKENS), stored(HASHES, [], 0, medium="CPU"), cleared())
    assert rig.pages == set()
    assert rig.take(stored([13], TOKENS[8:12], parent=12)).pages == on(GPU, NAMES[2:3])


def test_a_page_is_held_while_all_groups_of_full_attention_hold_it() -> None:
    kinds = ["full_attention", "mla_attention", "sink_full_attention"]
    rig = Rig().take(*(stored(HASHES, TOKENS, **of_group(number, kind)) for number, kind in enumerate(kinds)))
    assert rig.pages == on(GPU, NAMES)
    assert rig.take(removed([12], "GPU", group_idx=1)).pages == on(GPU, [NAMES[0], *NAMES[2:]])
    assert rig.take(stored([12], TOKENS[4:8], parent=11, **of_group(1, kinds[1]))).pages == on(GPU, NAMES)


@pytest.mark.parametrize("is_known_before", [True, False])
def test_storage_that_names_no_group_speaks_for_full_attention(is_known_before: bool) -> None:
    rig = Rig()
    device = stored(HASHES, TOKENS, **of_group(0, "full_attention"))
    window = stored(HASHES, TOKENS, **of_group(1, "sliding_window", 9))
    rig.take(device, window) if is_known_before else rig.take(stored(HASHES[:1], TOKENS[:4], medium="CPU"))
    rig.take(device, stored(HASHES[:3], [], 0, medium="CPU"))
    assert rig.pages == on(GPU, NAMES) | on(CPU, NAMES[:3])
    rig.take(removed(HASHES[:2], "CPU"), removed(HASHES[3:], "GPU", group_idx=0))
    assert rig.pages & on(CPU, NAMES) == on(CPU, NAMES[2:3])


def test_a_group_that_comes_later_takes_off_what_it_does_not_hold() -> None:
    rig = Rig().take(stored(HASHES, TOKENS, **of_group(0, "full_attention")))
    assert rig.pages == on(GPU, NAMES)
    rig.take(stored(HASHES[:2], TOKENS[:8], **of_group(1, "mla_attention")))
    assert rig.pages == on(GPU, NAMES[:2])
    assert rig.take(removed(HASHES, "GPU", group_idx=0), cleared()).pages == set()


def test_groups_of_one_specification_share_a_stream_and_must_all_hold_a_page() -> None:
    groups = [of_group(0, "sliding_window", 7), of_group(1, "sliding_window_mla", 7), of_group(2, "sliding_window", 9)]
    rig = Rig().take(
        *(stored(HASHES[2:], TOKENS[8:], parent=12, **group) for group in groups),
        stored(HASHES, TOKENS, **of_group(3, "full_attention")),
    )
    assert rig.groups == {"": on(GPU, NAMES), "swa:6": on(GPU, NAMES[2:]), "swa:8": on(GPU, NAMES[2:])}
    rig.take(removed([13], "GPU", group_idx=1))
    assert rig.groups["swa:6"] == on(GPU, NAMES[3:])
    assert rig.groups["swa:8"] == on(GPU, NAMES[2:])


def test_groups_that_hold_nothing_for_others_do_not_count() -> None:
    ignored = [of_group(1, "encoder_only_attention"), of_group(2, "cross_attention"), of_group(3, "sliding_window", 1)]
    rig = Rig().take(
        stored(HASHES, TOKENS, **of_group(0, "full_attention")), *(stored([7], TOKENS[:4], **each) for each in ignored)
    )
    assert rig.groups == {"": on(GPU, NAMES)}
    assert (rig.counters.other_groups, rig.translator.problem) == (3, "")


@pytest.mark.parametrize("fields", [of_group(1, "holographic"), of_group(1, "sliding_window")])
def test_a_group_whose_rule_is_not_known_is_a_problem(fields: dict[str, Any]) -> None:
    rig = Rig().take(stored(HASHES, TOKENS, **of_group(0, "full_attention")), stored([7], TOKENS[:4], **fields))
    assert rig.pages == on(GPU, NAMES)
    assert fields["kv_cache_spec_kind"] in rig.translator.problem


def test_very_different_block_sizes_are_a_problem_and_cost_nothing() -> None:
    rig = Rig().take(stored([7], TOKENS[:1], 1, **of_group(0, "full_attention")))
    rig.take(stored([8], [1] * 5000, 5000, **of_group(1, "mla_attention")), removed([8], "GPU", group_idx=1))
    assert "5000 tokens" in rig.translator.problem


def test_an_engine_with_very_many_groups_is_a_problem_and_gets_no_more_streams() -> None:
    rig = Rig().take(
        *(stored([7], TOKENS[:4], **of_group(number, "sliding_window", 2 + number)) for number in range(99))
    )
    assert len(rig.groups) == 18  # those of 16 groups, the worker's own, and that it has no full attention
    assert "16 attention groups" in rig.translator.problem
    rig.take(stored([9], TOKENS[:4], **of_group(0, "sliding_window", 2)))
    assert "16 attention groups" in rig.translator.problem


def test_a_group_that_changes_its_rule_is_a_problem_and_gets_no_other_stream() -> None:
    rig = Rig().take(stored(HASHES, TOKENS, **of_group(0, "full_attention")))
    for window in range(5, 50):
        rig.take(stored(HASHES, TOKENS, **of_group(1, "sliding_window", window)))
    assert set(rig.groups) == {"", "swa:4"}
    assert "attention group 1 became" in rig.translator.problem


def test_a_store_without_kind_and_tokens_does_not_make_a_group_of_full_attention() -> None:
    rig = Rig().take(stored(HASHES, TOKENS, **of_group(0, "full_attention")))
    rig.take(stored(HASHES, [], 0, medium="CPU", group_idx=1))
    assert rig.pages == on(GPU, NAMES)


def test_the_first_store_of_a_group_may_be_a_part_of_a_block() -> None:
    full, window = of_group(0, "full_attention"), of_group(1, "sliding_window", 9)
    rig = Rig(block_size=4).take(stored([11], TOKENS[:4], **full), stored([11], TOKENS[:4], **window))
    rig.take(removed([11], "GPU", group_idx=0), stored([12, 14], TOKENS, 8, **full), stored(HASHES, TOKENS, **window))
    assert rig.groups == {"": on(GPU, NAMES), "swa:8": on(GPU, NAMES), "step:8": set()}
    rig.take(stored([12], [], 0, medium="CPU", **full))
    assert rig.pages == on(GPU, NAMES) | on(CPU, NAMES[:2])
    rig.take(removed([12, 14], "GPU", group_idx=0), removed([12], "CPU", group_idx=0))
    assert rig.pages == set()


def test_a_group_with_smaller_blocks_changes_the_pages_at_once() -> None:
    rig = Rig().take(stored([12, 14], TOKENS, 8, **of_group(0, "full_attention")))
    rig.take(stored(HASHES, TOKENS, **of_group(1, "sliding_window", 9)))
    assert rig.translator.block_size == 4
    rig.take(stored([12, 14], TOKENS, 8, **of_group(0, "full_attention")))
    assert rig.pages == on(GPU, NAMES)


def test_chunks_need_the_size_that_the_registration_names() -> None:
    stores = [stored(HASHES, TOKENS, **of_group(n, kind)) for n, kind in ((0, ""), (1, "chunked_local_attention"))]
    assert "attention_chunk_size" in Rig().take(*stores).translator.problem
    rig = Rig(attention_chunk_size=8).take(*stores)
    assert rig.groups == {"": on(GPU, NAMES), "chunk:8": on(GPU, NAMES)}


def test_a_large_block_is_named_by_its_last_page_and_the_step_is_that_of_all_groups() -> None:
    rig = Rig().take(
        stored([12, 14], TOKENS, 8, **of_group(0, "sliding_window", 9)),
        stored(HASHES, TOKENS, **of_group(1, "full_attention")),
    )
    assert rig.groups == {"": on(GPU, NAMES), "swa:8/8": on(GPU, [NAMES[1], NAMES[3]]), "step:8": set()}


def test_large_blocks_of_full_attention_are_cut_into_pages() -> None:
    rig = Rig().take(
        stored(HASHES[2:], TOKENS[8:], parent=12, **of_group(0, "mamba")),
        stored([12, 14], TOKENS, 8, **of_group(1, "full_attention")),
    )
    assert rig.groups == {"": on(GPU, NAMES), "mamba": on(GPU, NAMES[2:]), "step:8": set()}
    assert rig.take(removed([14], "GPU", group_idx=1)).pages == on(GPU, NAMES[:2])


def test_an_engine_without_full_attention_says_so_and_takes_it_back() -> None:
    rig = Rig().take(stored([14], TOKENS, **of_group(0, "mamba")))
    assert rig.groups == {"": set(), "mamba": on(GPU, NAMES[3:]), "nofull": set()}
    rig.take(stored(HASHES, TOKENS, **of_group(1, "full_attention")))
    assert rig.groups == {"": on(GPU, NAMES), "mamba": on(GPU, NAMES[3:])}


def test_an_engine_with_eagle_has_a_stream_that_says_so() -> None:
    rig = Rig(eagle=True).take(stored(HASHES, TOKENS))
    assert rig.groups == {"": on(GPU, NAMES), "eagle": set()}


def test_pages_are_known_by_group_and_hash() -> None:
    rig = Rig().take(
        stored([7], TOKENS[:4], **of_group(0, "full_attention")),
        stored([7], TOKENS[:4], **of_group(1, "sliding_window", 5)),
        removed([7], "GPU", group_idx=1),
    )
    assert rig.groups == {"": on(GPU, NAMES[:1]), "swa:4": set()}
    assert rig.take(removed([7], "GPU", group_idx=0)).pages == set()


def test_a_removal_that_names_no_group_means_all_of_them() -> None:
    rig = Rig().take(stored([7], TOKENS[:4], group_idx=2, kv_cache_spec_kind="full_attention"), removed([7]))
    assert rig.pages == set()


def test_removals_of_groups_that_never_stored_anything_leave_room_for_those_that_do() -> None:
    rig = Rig().take(*(removed([7], "GPU", group_idx=group) for group in range(5000)))
    assert rig.take(stored([7], TOKENS[:4], group_idx=9999)).pages == on(GPU, NAMES[:1])
    assert rig.counters.refused_spaces == 0


@pytest.mark.parametrize("is_full_first", [True, False])
def test_a_mamba_group_may_state_a_chunk_of_tokens_and_one_hash(is_full_first: bool) -> None:
    stores = [
        stored([12], [1] * 3840, 768, group_idx=1, kv_cache_spec_kind="mamba"),
        stored([8, 9, 10, 11, 12], [1] * 3840, 768, group_idx=0, kv_cache_spec_kind="full_attention"),
    ]
    rig = Rig().take(*(reversed(stores) if is_full_first else stores))
    names = names_of([1] * 3840, 768)
    assert rig.groups == {"": on(GPU, names), "mamba": on(GPU, names[4:])}
    assert rig.translator.block_size == 768


def test_a_last_page_that_is_not_full_is_dropped() -> None:
    rig = Rig().take(stored(HASHES[:3], TOKENS[:10]))
    assert rig.pages == on(GPU, NAMES[:2])
    assert rig.counters.partial_pages == 1


def test_pages_of_another_size_than_the_streams_are_left_out() -> None:
    rig = Rig().take(stored(HASHES[:1], TOKENS[:4]), stored([5], TOKENS[:8], 8), stored([6], TOKENS[:3], 3))
    assert rig.pages == on(GPU, NAMES[:1])
    assert rig.counters.other_block_sizes == 2


def test_a_number_of_tokens_that_fits_no_number_of_pages_is_a_mistake() -> None:
    rig = Rig().take(stored(HASHES[:2], TOKENS), stored([1], TOKENS[:4]))
    assert rig.pages == on(GPU, NAMES[:1])
    assert rig.counters.bad_events == {"token_count": 1}


def test_a_hash_that_comes_to_mean_another_page_does_not_keep_the_old_one() -> None:
    rig = Rig().take(stored([1], TOKENS[:4]), stored([1], TOKENS[4:8]))
    assert rig.pages == on(GPU, names_of(TOKENS[4:8]))


def come_and_go(rig: Rig, hashes: range, at_a_time: int = 64) -> None:
    """Store and then remove pages of one token each, in batches."""
    for first in hashes[::at_a_time]:
        here = range(first, min(first + at_a_time, hashes.stop))
        rig.take(*(stored([i], [i % 60_000], 1) for i in here))
        rig.take(removed(here))


def test_hashes_of_removed_pages_are_forgotten_when_there_are_too_many() -> None:
    rig = Rig(name_pages=1024, block_size=1)
    come_and_go(rig, range(1, 4097))
    rig.take(stored([9_000], [7], 1))
    assert rig.translator.num_remembered <= 1024 + 1
    rig.take(stored([10_000], [5], 1, parent=1), stored([10_001], [5], 1, parent=4096))
    assert rig.counters.unknown_parents == 1
    assert len(rig.pages) == 2


def test_the_hash_of_a_page_that_is_resident_is_never_forgotten() -> None:
    rig = Rig(name_pages=1024, block_size=1)
    rig.take(*(stored([i], [i], 1) for i in range(1, 3001)))
    rig.take(removed(range(1, 2001)))
    rig.take(*(stored([i], [i], 1, medium="CPU") for i in range(1, 501)))
    come_and_go(rig, range(10_000, 30_000))
    rig.take(*(stored([50_000 + i], [i], 1, parent=i) for i in (*range(1, 501), *range(2001, 3001))))
    assert rig.counters.unknown_parents == 0
    assert len(rig.pages) == 3000
    assert rig.translator.num_remembered <= 3000 + 1024 + 64


def test_hashes_do_not_grow_with_an_engines_work() -> None:
    rig = Rig(name_pages=1_000_000, block_size=1)
    come_and_go(rig, range(1, 200_001), 5000)
    assert 65_536 <= rig.translator.num_remembered <= 65_536 + 5000


def test_what_a_cleared_engine_held_may_be_forgotten() -> None:
    rig = Rig(name_pages=1024, block_size=1)
    rig.take(*(stored([i], [i], 1) for i in range(1, 5001)))
    rig.take(cleared())
    rig.take(stored([9_000], [7], 1))
    assert rig.translator.num_remembered <= 1024 + 1
    assert len(rig.pages) == 1


def test_hashes_of_what_an_engine_may_still_hold_survive_a_drop_of_all_pages() -> None:
    rig = Rig(name_pages=1_000_000, ledger_pages=100_000, block_size=1)
    come_and_go(rig, range(200_000, 270_000), 5000)
    held = range(1, 80_001)
    rig.take(stored(held, [i % 60_000 for i in held], 1))
    rig.translator.clear()  # as when a batch is lost
    rig.take(*(stored([10**6 + i], [5], 1, parent=i) for i in held[::400]))
    rig.take(stored(held[::7], [], 0, medium="CPU"))
    assert (rig.counters.unknown_parents, rig.counters.unresolved_pages) == (0, 0)
    for first in range(2 * 10**6, 2 * 10**6 + 50):  # excess pages are forgotten step by step
        rig.take(stored([first], [first], 1))
    assert rig.translator.num_remembered <= 80_000 + len(rig.pages)


def test_a_page_whose_hash_is_anothers_and_that_is_forgotten_does_not_stay_when_it_is_renamed() -> None:
    rig = Rig(name_pages=1, block_size=1)
    rig.take(stored([7], [1], 1, cache_salt="a"), form="map")
    rig.take(stored([7], [1], 1, cache_salt="b", medium="CPU"), form="map")
    rig.take(removed([7], "GPU"))
    come_and_go(rig, range(100, 400))
    rig.take(stored([7], [2], 1, cache_salt="b"), form="map")
    assert rig.pages == on(GPU, names_of([2], 1, salt="b"))
    rig.take(removed([7], "GPU"))
    assert rig.pages == set()


def test_a_page_whose_hash_is_anothers_and_that_comes_back_without_tokens_can_be_removed() -> None:
    rig = Rig(block_size=1)
    for salt in "ab":
        rig.take(stored([7], [1], 1, cache_salt=salt), form="map")
    rig.take(cleared())
    rig.take(stored([7], [], 0, cache_salt="b", medium="CPU"), form="map")
    assert rig.pages == on(CPU, names_of([1], 1, salt="b"))
    rig.take(removed([7], "CPU"))
    assert rig.pages == set()


def test_a_hash_that_comes_to_mean_another_page_on_a_medium_that_is_none_does_not_keep_the_old_one() -> None:
    rig = Rig(block_size=1).take(stored([7], [1], 1), stored([7], [2], 1, medium="WEIRD"))
    assert rig.pages == set()
    rig.take(stored([7], [2], 1))
    assert rig.pages == on(GPU, names_of([2], 1))


def test_pages_beyond_the_ledger_are_left_out_and_taken_once_there_is_room() -> None:
    rig = Rig(name_pages=20_000, block_size=1)  # 10,000 pages count as held
    rig.take(*(stored([i], [i], 1) for i in range(1, 12_001)))
    assert len(rig.pages) == 10_000
    rig.take(removed(range(1, 5001)))
    rig.take(*(stored([i], [i], 1) for i in range(10_001, 12_001)))
    assert len(rig.pages) == 7000


def test_a_prefix_that_is_asked_for_again_and_again_is_not_forgotten() -> None:
    rig = Rig(name_pages=1024, block_size=1).take(stored([1], [1], 1))
    for i in range(2, 5000):
        rig.take(stored([i], [i], 1, parent=1))
    assert rig.counters.unknown_parents == 0
