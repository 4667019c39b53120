"""Attention groups: in which stream their pages are published, and what makes a page held."""

from typing import Any

import pytest

from tests.models.stream_reader import Pages
from tests.rigs.bridge import CPU, GPU, Rig, on
from tests.support.engines.event_payloads import Event, cleared, names_of, removed, stored

TOKENS = list(range(100, 116))
NAMES = names_of(TOKENS)
HASHES = [11, 12, 13, 14]


def of_group(number: int, kind: str, window: int | None = None) -> dict[str, Any]:
    more = {} if window is None else {"kv_cache_spec_sliding_window": window}
    return {"group_idx": number, "kv_cache_spec_kind": kind, **more}


def test_copies_of_another_medium_or_group_are_counted_apart() -> None:
    group = of_group(0, "full_attention")
    rig = Rig().take(
        stored(HASHES, TOKENS, **group), stored(HASHES, TOKENS, **group), stored(HASHES, [], 0, medium="CPU", **group)
    )
    assert rig.take(removed(HASHES, "CPU", group_idx=0)).pages == on(GPU, NAMES)
    assert rig.take(removed(HASHES, "GPU", group_idx=0)).pages == on(GPU, NAMES)
    assert rig.take(removed(HASHES, "GPU", group_idx=0)).pages == set()


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


FULL, MAMBA, WINDOW = of_group(0, "full_attention"), of_group(1, "mamba"), of_group(2, "sliding_window", 9)
LATER_FULL = of_group(3, "full_attention")
GROUPS: list[tuple[str, dict[str, Any], list[tuple[list[Event], dict[str, Pages]]]]] = [
    (
        "a large block is named by its last page, and the step is that of all groups",
        {},
        [
            (
                [stored([12, 14], TOKENS, 8, **WINDOW), stored(HASHES, TOKENS, **LATER_FULL)],
                {"": on(GPU, NAMES), "swa:8/8": on(GPU, NAMES[1::2]), "step:8": set()},
            )
        ],
    ),
    (
        "large blocks of full attention are cut into pages",
        {},
        [
            (
                [stored(HASHES[2:], TOKENS[8:], parent=12, **MAMBA), stored([12, 14], TOKENS, 8, **LATER_FULL)],
                {"": on(GPU, NAMES), "mamba": on(GPU, NAMES[2:]), "step:8": set()},
            ),
            (
                [removed([14], "GPU", group_idx=3)],
                {"": on(GPU, NAMES[:2]), "mamba": on(GPU, NAMES[2:]), "step:8": set()},
            ),
        ],
    ),
    (
        "an engine without full attention says so until it has some",
        {},
        [
            ([stored([14], TOKENS, **MAMBA)], {"": set(), "mamba": on(GPU, NAMES[3:]), "nofull": set()}),
            ([stored(HASHES, TOKENS, **FULL)], {"": on(GPU, NAMES), "mamba": on(GPU, NAMES[3:])}),
        ],
    ),
    (
        "an engine with EAGLE has a stream of that name",
        {"eagle": True},
        [([stored(HASHES, TOKENS)], {"": on(GPU, NAMES), "eagle": set()})],
    ),
    (
        "pages are known by group and hash",
        {},
        [
            (
                [stored([7], TOKENS[:4], **FULL), stored([7], TOKENS[:4], **WINDOW), removed([7], "GPU", group_idx=2)],
                {"": on(GPU, NAMES[:1]), "swa:8": set()},
            ),
            ([removed([7], "GPU", group_idx=0)], {"": set(), "swa:8": set()}),
        ],
    ),
    (
        "a removal that names no group means all of them",
        {},
        [([stored([7], TOKENS[:4], **LATER_FULL), removed([7])], {"": set()})],
    ),
]


@pytest.mark.parametrize(("defaults", "steps"), [pytest.param(*case, id=name) for name, *case in GROUPS])
def test_pages_of_groups_are_in_their_streams(defaults: dict[str, Any], steps: list[Any]) -> None:
    rig = Rig(**defaults)
    for events, groups in steps:
        assert rig.take(*events).groups == groups


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


@pytest.mark.parametrize(
    ("hashes", "tokens", "places", "num_unresolved"),
    [
        ([12], TOKENS, [1], 0),
        ([14], TOKENS, [3], 0),
        ([13, 14], TOKENS, [2, 3], 0),
        ([9, 12, 14], TOKENS, [0, 1, 3], 0),
        ([9, 11], TOKENS, [0], 1),
        ([9, 10, 12, 13, 14], TOKENS, [0, 1, 2, 3], 1),
        ([11, 13, 14], TOKENS[:15], [0], 2),
    ],
)
def test_a_block_of_an_event_that_leaves_some_out_stands_before_the_next_one_that_is_named(
    hashes: list[int], tokens: list[int], places: list[int], num_unresolved: int
) -> None:
    rig = Rig().take(stored(HASHES[:2], TOKENS[:8], **FULL), stored(hashes, tokens, **WINDOW))
    assert rig.groups["swa:8"] == on(GPU, [NAMES[place] for place in places])
    assert rig.counters.unresolved_pages == num_unresolved
    rig.take(removed(hashes, "GPU", group_idx=2))
    assert rig.groups["swa:8"] == set()


def test_an_event_that_leaves_out_blocks_and_states_keys_of_others_names_none() -> None:
    named = {"extra_keys": [None, ["image"]], **WINDOW}
    rig = Rig().take(stored(HASHES[:2], TOKENS[:8], **FULL), stored([13, 14], TOKENS, **named))
    assert (rig.groups["swa:8"], rig.counters.unresolved_pages) == (set(), 2)


@pytest.mark.parametrize(("num_pages", "is_named"), [(8192, True), (8193, False)])
def test_an_event_that_leaves_out_blocks_has_a_bound(num_pages: int, is_named: bool) -> None:
    tokens = list(range(4 * num_pages))
    rig = Rig().take(stored(HASHES[:2], TOKENS[:8], **FULL), stored([14], tokens, **WINDOW))
    assert rig.groups["swa:8"] == (on(GPU, names_of(tokens)[-1:]) if is_named else set())
    assert rig.counters.unresolved_pages == (not is_named)
