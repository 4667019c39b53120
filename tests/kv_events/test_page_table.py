"""The page table against a dict, with keys that are chosen to collide."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events.kernels import page_table, page_table_ops
from kv_events.kernels.bundles import I64Vector, Spread, U64Input
from kv_events.kernels.declare import kernel
from kv_events.kernels.page_table import LONGEST_WALK, Table
from tests.support.effort import num_examples
from tests.support.plain_tables import PLAIN


@kernel
def _insert_all(table: Spread[Table], wanted: U64Input, out: I64Vector) -> None:
    for i in range(wanted.shape[0]):
        out[i] = page_table_ops.find(table, wanted[i])
        if out[i] < 0:
            out[i] = page_table_ops.insert(table, wanted[i])


@kernel
def _enter_all(table: Spread[Table], wanted: U64Input, out: I64Vector) -> None:
    """As `_insert_all`, with a single walk for each key."""
    for i in range(wanted.shape[0]):
        known = page_table_ops.find(table, wanted[i])
        out[i], is_new = page_table_ops.find_or_insert(table, wanted[i])
        if is_new != (known < 0):
            out[i] = -2


@kernel
def _remove_all(table: Spread[Table], wanted: U64Input, out: I64Vector) -> None:
    for i in range(wanted.shape[0]):
        out[i] = page_table_ops.find(table, wanted[i])
        if out[i] >= 0:
            page_table_ops.remove(table, out[i])


def run(kernel: object, table: Table, keys: list[int]) -> list[int]:
    out = np.empty(len(keys), np.int64)
    kernel(table, np.array(keys, np.uint64), out)  # type: ignore[operator]
    return out.tolist()


def crowded(bucket: int, number: int, low: int = 0) -> int:
    """Return a key with a given home bucket (of 512) and a tag that others share, in a table with the secret PLAIN."""
    return bucket << 55 | number << 32 | low


SPREAD_KEYS = st.builds(lambda a, b: (a << b) % 2**64, st.integers(0, 50), st.sampled_from([0, 1, 12, 32, 52, 63]))
CROWDED_KEYS = st.builds(crowded, st.sampled_from([0, 1, 2, 510, 511]), st.integers(0, 15))
KEYS = SPREAD_KEYS | CROWDED_KEYS
KERNELS = st.sampled_from([_insert_all, _enter_all, _remove_all])


@given(st.lists(st.tuples(KERNELS, st.lists(KEYS, min_size=1, max_size=30)), max_size=30))
def test_any_order_of_inserts_and_removals_equals_a_dict(steps: list[tuple[object, list[int]]]) -> None:
    table, model = page_table.make_table(100, PLAIN), dict[int, int]()
    for change, keys in steps:
        if change is not _remove_all:
            for key, entry in zip(keys, run(change, table, keys), strict=True):
                if key in model:
                    assert entry == model[key]
                elif entry < 0:
                    assert entry == -1
                    assert len(model) == 100
                else:
                    assert entry not in model.values()
                    model[key] = entry
        else:
            for key, entry in zip(keys, run(_remove_all, table, keys), strict=True):
                assert entry == model.pop(key, -1)
        page_table.check(table)
        assert page_table.num_live(table) == len(model)


@settings(max_examples=num_examples(5))
@given(st.integers(0, 2**32))
def test_a_table_grows_over_many_segments_and_keeps_every_key(seed: int) -> None:
    table = page_table.make_table(40_000)
    keys = np.random.default_rng(seed).choice(2**62, 40_000, replace=False).tolist()
    entries = run(_enter_all, table, keys)
    assert sorted(entries) == list(range(40_000))
    assert run(_insert_all, table, keys) == entries == run(_enter_all, table, keys)
    assert run(_remove_all, table, keys[::2]) == entries[::2]
    page_table.check(table)
    assert run(_remove_all, table, keys[::2]) == [-1] * 20_000
    assert sorted(run(_insert_all, table, keys[::2])) == sorted(entries[::2])


def test_neighbours_in_arrival_get_neighbouring_entries_again_after_removal() -> None:
    table = page_table.make_table(1000)
    run(_insert_all, table, list(range(100, 200)))
    run(_remove_all, table, list(range(120, 130)))
    assert run(_insert_all, table, list(range(500, 510))) == list(range(20, 30))


@settings(max_examples=num_examples(10))
@given(st.integers(0, 511), st.integers(0, 2**32))
def test_keys_with_one_tag_fill_the_buckets_near_their_home_and_are_then_refused(bucket: int, seed: int) -> None:
    table = page_table.make_table(10_000, PLAIN)
    keys = [crowded(bucket, 5, low) for low in range(600)]
    entries = run(_enter_all, table, keys)
    assert entries == [*range(LONGEST_WALK), *[-1] * (600 - LONGEST_WALK)]
    page_table.check(table)
    gone = np.random.default_rng(seed).choice(600, 400, replace=False).tolist()
    assert run(_remove_all, table, [keys[i] for i in gone]) == [entries[i] for i in gone]
    page_table.check(table)
    left = sorted(set(range(LONGEST_WALK)) - set(gone))
    assert run(_insert_all, table, [keys[i] for i in left]) == left


def test_keys_chosen_without_the_secret_all_fit() -> None:
    keys = [crowded(3, 5, low) for low in range(4300)]
    for step in (1, 2**20, 2**31):  # keys that differ in their lower, middle and upper bits
        table = page_table.make_table(10_000)
        assert run(_enter_all, table, [key * step % 2**64 for key in keys]) == list(range(4300))


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1))
def test_a_tag_is_the_upper_end_of_a_product(secret: bytes, key: int) -> None:
    table = page_table.make_table(10, secret)
    run(_insert_all, table, [key])
    assert int(table.slots[table.slots != 0][0]) >> 32 == key * int.from_bytes(secret, "little") % 2**128 >> 96


def test_keys_that_found_their_buckets_full_are_found_when_others_go() -> None:
    table = page_table.make_table(1000, PLAIN)
    keys = [crowded(bucket, number) for bucket in (511, 0, 1) for number in range(20)]
    entries = run(_insert_all, table, keys)
    for gone in range(len(keys)):
        assert run(_remove_all, table, [keys[gone]]) == [entries[gone]]
        assert run(_insert_all, table, keys[gone + 1 :]) == entries[gone + 1 :]
        page_table.check(table)
    assert page_table.num_live(table) == 0


def test_clear_forgets_everything() -> None:
    table = page_table.make_table(20_000)
    run(_insert_all, table, list(range(20_000)))
    page_table.clear(table)
    page_table.check(table)
    assert page_table.num_live(table) == 0
    assert run(_insert_all, table, [7]) == [0]


def test_the_key_0_is_inserted_without_a_kernel() -> None:
    table = page_table.make_table(100)
    page_table.insert_zero(table)
    page_table.check(table)
    assert run(_enter_all, table, [0, 5, 0]) == [0, 1, 0]
