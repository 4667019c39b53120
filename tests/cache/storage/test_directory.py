"""The local directory: names and content of files, damage, its bound, threads. The records of held pages."""

import logging
import os
import shutil
import threading
import time
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine_cache.storage import PageLayout, PoolName, PoolTransfer, StorageIdentity
from engine_cache.storage.base import TrackedPages
from engine_cache.storage.directory import DirectoryStorage
from tests.rigs.page_pools import KEYS, PagePool, get, held, put

IDENTITY = StorageIdentity("org/model", PageLayout("bfloat16", 2, (1, 3), "page_first"))
FILE_BYTES = 2 * 3 * 2 + 8


@pytest.fixture
def open_store(tmp_path):
    def opener(num_pages=100, identity=IDENTITY):
        store = DirectoryStorage(tmp_path / "pages", identity, capacity_bytes=num_pages * FILE_BYTES)
        store.kv = PagePool()  # type: ignore[attr-defined]
        store.register_mem_pool_host(store.kv)  # type: ignore[attr-defined]
        return store

    return opener


@pytest.fixture
def store(open_store):
    store = open_store()
    yield store
    store.check()


def file_of(tmp_path, page):
    (path,) = (tmp_path / "pages").glob(f"*{KEYS[page]}*.bin")
    return path


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_the_flat_page_and_a_checksum_that_knows_the_name(store, tmp_path):
    put(store, 0)
    path = file_of(tmp_path, 0)
    content = path.read_bytes()
    assert content[:-8] == store.kv.page_bytes(0)
    seed = xxhash.xxh3_64_intdigest(path.name.encode())
    assert content[-8:] == xxhash.xxh3_64_digest(store.kv.page_bytes(0), seed)


def test_files_are_named_after_page_pool_model_and_rank(open_store, tmp_path):
    store = open_store(identity=StorageIdentity("org/model", IDENTITY.layout, use_fingerprint=False))
    store.register_mem_host_pool_v2(PagePool(page_size=1), PoolName.INDEXER)
    put(store, 0)
    store.batch_set_v2([PoolTransfer(PoolName.INDEXER, store.kv.indices(0)[:1], keys=KEYS[:1])])
    names = {path.name for path in (tmp_path / "pages").iterdir()}
    assert names == {f"{KEYS[0]}_org-model_0_1.bin", f"{KEYS[0]}.indexer_org-model_0_1.bin"}


def test_what_a_crashed_writer_left_goes_at_the_next_opening(open_store, tmp_path):
    put(open_store(), 0, 1)
    for page, age_s in ((0, 3600), (1, 1)):
        path = file_of(tmp_path, page)
        left = path.rename(path.with_name(f"{path.name}.0123abcd.tmp"))
        os.utime(left, (time.time() - age_s,) * 2)
    foreign = tmp_path / "pages" / "notes.txt"
    foreign.write_text("not ours")
    stats = open_store().get_stats()
    assert (stats.num_held, stats.held_bytes) == (0, 0)
    assert set((tmp_path / "pages").iterdir()) == {left, foreign}  # the newer one may still be in use by a writer


def test_clearing_leaves_foreign_files(store, tmp_path):
    put(store, 0)
    foreign = [tmp_path / "pages" / name for name in ("notes.txt", f"{KEYS[0]}_org-other_0_1.bin")]
    for path in foreign:
        path.write_text("not ours")
    store.clear()
    assert sorted((tmp_path / "pages").iterdir()) == sorted(foreign)


# --- damage ----------------------------------------------------------------------------------------------------------


def shorten(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    with path.open("ab") as file:
        file.write(b"x")


def flip(path):
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [shorten, lengthen, flip])
def test_a_damaged_page_is_a_miss_and_is_reported_once(store, tmp_path, caplog, damage):
    put(store, 0, 1, 2)
    path = file_of(tmp_path, 1)
    damage(path)
    target = store.kv.page_bytes(1)
    with caplog.at_level(logging.WARNING):
        assert get(store, 0, 1, 2) == get(store, 0, 1, 2) == [True, False, True]
        assert store.batch_exists(KEYS) == 1
    assert [record.levelname for record in caplog.records if path.name in record.message] == ["WARNING"]
    assert store.get_stats().num_damaged == 1
    assert store.take_removed() == [KEYS[1]]
    assert not path.exists()
    assert store.kv.page_bytes(1) == target  # damaged bytes never reach the pool
    assert put(store, 1) == get(store, 1) == [True]


def test_a_page_that_cannot_be_read_is_a_miss_and_stays(store, tmp_path, caplog):
    put(store, 0)
    path = file_of(tmp_path, 0)
    path.unlink()
    path.symlink_to(path.name)
    with caplog.at_level(logging.WARNING):
        assert get(store, 0) == [False]
        assert store.batch_exists(KEYS) == 0
    assert "cannot be read" in caplog.text
    assert store.get_stats().num_damaged == 0


def test_a_page_that_cannot_be_written_is_false_and_takes_no_room(store, tmp_path):
    put(store, 0)
    shutil.rmtree(tmp_path / "pages")
    assert put(store, 1, 2) == [False, False]
    assert store.get_stats().num_failed_writes == 2
    (tmp_path / "pages").mkdir()
    assert put(store, 1, 2) == [True, True]
    store.batch_exists(KEYS)  # detects that page 0 was removed


# --- the bound -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_page_goes_first(open_store, tmp_path):
    store = open_store(num_pages=3)
    for page in (0, 1, 2):
        put(store, page)
    get(store, 0)
    put(store, 1)
    put(store, 3)
    assert held(store) == [0, 1, 3]
    assert store.take_removed() == [KEYS[2]]
    assert sum(path.stat().st_size for path in (tmp_path / "pages").iterdir()) == 3 * FILE_BYTES
    assert store.get_stats().num_evicted == 1


@pytest.mark.parametrize("use", [put, get])
def test_of_one_batch_the_beginning_stays_longest(open_store, use):
    store = open_store(num_pages=4)
    put(store, 0, 1, 2, 3)
    use(store, 0, 1, 2, 3)
    put(store, 4)
    put(store, 5)
    assert held(store) == [0, 1, 4, 5]


def test_a_batch_beyond_the_bound_keeps_its_beginning(open_store):
    store = open_store(num_pages=4)
    put(store, 8, 9, 10)
    assert put(store, 0, 8, 1, 2, 3, 4) == [True, True, True, True, False, False]
    assert held(store) == [0, 1, 2, 8]
    assert store.take_removed() == [KEYS[10], KEYS[9]]


def test_a_page_that_cannot_be_removed_still_counts_and_is_tried_again(open_store, tmp_path, caplog):
    store = open_store(num_pages=2)
    put(store, 0)
    put(store, 1)
    path = file_of(tmp_path, 0)
    path.unlink()
    path.mkdir()  # a folder cannot be unlinked
    assert put(store, 2) == [True]
    assert f"page {path.name} cannot be evicted" in caplog.text
    assert held(store) == [0, 2]
    assert store.take_removed() == [KEYS[1]]
    assert store.get_stats()[-3:] == (1, 2, 2 * FILE_BYTES)
    path.rmdir()
    assert put(store, 3) == [True]  # replaces page 2, which is older now
    assert put(store, 4) == [True]
    assert held(store) == [3, 4]
    store.check()


def test_the_next_opening_takes_over_pages_and_their_order(open_store, tmp_path):
    store = open_store(num_pages=4)
    for page in (0, 1, 2):
        put(store, page)
        os.utime(file_of(tmp_path, page), (page, page))
    get(store, 0)
    store.close()
    again = open_store(num_pages=2)
    assert held(again) == [0, 2]
    assert get(again, 0, 2) == [True, True]
    again.check()


def test_pages_of_another_store_count_once_they_are_read(open_store):
    store, other = open_store(num_pages=2), open_store()
    put(store, 0, 1)
    put(other, 2)
    assert store.batch_exists(KEYS) == 3
    assert held(store) == [0, 1]
    get(store, 2)
    assert held(store) == [0, 2]
    store.check()


def test_a_store_without_room_for_one_page_is_refused(tmp_path):
    with pytest.raises(ValueError, match="capacity_bytes: got 0"):
        DirectoryStorage(tmp_path, IDENTITY, capacity_bytes=0)
    store = DirectoryStorage(tmp_path, IDENTITY, capacity_bytes=FILE_BYTES - 1)
    with pytest.raises(ValueError, match=rf"capacity_bytes: got {FILE_BYTES - 1}.*kv, {FILE_BYTES} bytes"):
        store.register_mem_pool_host(PagePool())


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        DirectoryStorage(tmp_path / "file" / "pages", IDENTITY, capacity_bytes=100)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_threads_that_write_read_and_evict_at_once_never_get_a_wrong_page(open_store):
    store = open_store(num_pages=5)
    wanted = [store.kv.page_bytes(page) for page in range(10)]
    wrong = []

    def work(seed):
        target = 10 + seed
        for step in range(150):
            page = (step * (2 * seed + 3) + seed) % 10
            put(store, page, (page + 1) % 10)
            if store.batch_get_v1([KEYS[page]], store.kv.indices(target)) == [True]:
                wrong.extend([page] * (store.kv.page_bytes(target) != wanted[page]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.get_stats().num_damaged == 0
    assert store.get_stats().num_read > 0
    store.check()


# --- the pages that any store is known to hold, whatever the order in which answers arrive ---


FEW_KEYS = st.lists(st.sampled_from("abcdef"), max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), FEW_KEYS, st.booleans()),
        st.tuples(st.just("lose"), FEW_KEYS),
        st.tuples(st.sampled_from(["lose_all", "forget_all", "take_lost"])),
    ),
    max_size=30,
)


def test_what_was_missed_before_it_was_seen_is_not_lost():
    held = TrackedPages(limit=9)
    held.hold(["a", "b"], held.moment)
    moment = held.moment
    held.hold(["a"], moment)
    held.lose(["a", "b"], moment)
    assert (held.keys(), held.take_lost()) == (["a"], ["b"])


@given(STEPS, st.integers(1, 4))
def test_announcing_what_is_held_and_withdrawing_what_is_lost_ends_as_what_is_held(steps, limit):
    held, told, before = TrackedPages(limit), set(), -1
    seen: list[Any] = []
    for what, *arguments in steps:
        if what == "hold":
            keys, is_late = arguments
            held.hold(keys, before if is_late else held.moment)
            if not is_late:
                seen = ([key for key in seen if key not in keys] + list(dict.fromkeys(reversed(keys)))[::-1])[-limit:]
                told |= {key for key in keys if key in held}
        elif what == "lose":
            held.lose(arguments[0], held.moment)
            seen = [key for key in seen if key not in arguments[0]]
        elif what == "take_lost":
            told -= set(held.take_lost())
        else:
            before = held.moment
            getattr(held, what)()
            seen = []
            if what == "forget_all":
                told = set()
        assert held.keys() == seen
        assert len(held) == len(seen)
    assert told - set(held.take_lost()) == set(seen)
