"""The handling of result codes of a Mooncake store."""

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="stores need torch: pip install kvsight[engine]")
pytest.importorskip("mooncake", reason="pip install kvsight[mooncake]")

from engine_cache.storage import mooncake, page_keys
from tests.rigs.mooncake import own_identity
from tests.rigs.mooncake_double import NOT_FOUND, OVERFLOW, TRANSFER_FAILED
from tests.support.caches.page_pools import PagePool
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch
KEYS = page_keys([f"{page:064x}" for page in range(4)])


def one_too_few(codes):
    return codes[:-1]


def overflow(codes):
    return [OVERFLOW] * len(codes)


def transfer_failed(codes):
    return [TRANSFER_FAILED] * len(codes)


@pytest.fixture
def open_pages(open_store):
    """Opens stores with one page pool."""

    def opener(identity=None, page_size=2, **settings):
        store = open_store(identity, **settings)
        store.kv = PagePool(num_runs=2, page_size=page_size)
        store.register_mem_pool_host(store.kv)
        return store

    return opener


@pytest.fixture
def store(open_pages):
    """A store that has written pages 0 to 2 and holds them."""
    store = open_pages()
    assert put(store, 0, 1, 2) == [True] * 3
    return store


def put(store, *pages):
    return store.batch_set_v1([KEYS[page] for page in pages], store.kv.indices(*pages))


def get(store, *pages):
    return store.batch_get_v1([KEYS[page] for page in pages], store.kv.indices(*pages))


def held(store):
    return [page for page, key in enumerate(KEYS) if store.is_held(key)]


@pytest.mark.parametrize("answer", [one_too_few, overflow])
def test_a_page_of_which_nothing_was_reported_is_not_used_and_not_withdrawn(store, answer):
    store.native.exist_answers.append(answer)
    assert store.batch_exists(KEYS) == 0
    assert (store.take_removed(), held(store)) == ([], [0, 1, 2])
    assert store.batch_exists(KEYS) == 3


@pytest.mark.parametrize("answer", [one_too_few, overflow])
def test_a_page_of_which_nothing_was_reported_is_written_but_not_held(store, answer):
    store.native.exist_answers.extend([answer, answer])  # before and after the writing
    assert put(store, 3) == [True]
    assert held(store) == [0, 1, 2]
    assert put(store, 3) == [True]
    assert held(store) == [0, 1, 2, 3]


@pytest.mark.parametrize("answer", [one_too_few, overflow, transfer_failed])
def test_a_page_that_could_not_be_read_may_still_be_there(store, answer):
    store.native.get_answers.append(answer)
    assert get(store, 0, 1, 2) == [False] * 3
    assert (store.take_removed(), held(store)) == ([], [0, 1, 2])
    assert get(store, 0, 1, 2) == [True] * 3


def test_a_page_of_which_an_object_was_removed_is_withdrawn_whatever_becomes_of_the_other(store):
    store.native.get_answers.append(lambda codes: [*codes[:2], TRANSFER_FAILED, NOT_FOUND, TRANSFER_FAILED, codes[5]])
    assert get(store, 0, 1, 2) == [True, False, False]
    assert (store.take_removed(), held(store)) == ([KEYS[1]], [0, 2])


@pytest.fixture
def watched(open_pages, monkeypatch):
    """Like `store`, but suspected losses are checked at once."""
    monkeypatch.setattr(mooncake, "_LENDER_TTL_S", 0.0)
    store = open_pages(mooncake_watch_interval_s=0.005)
    assert put(store, 0, 1, 2) == [True] * 3
    return store


@pytest.mark.parametrize("failing_looks", [0, 2])
def test_pages_that_died_with_a_lender_are_withdrawn_by_the_first_look_that_reports_them(watched, failing_looks):
    watched.native.batch_remove(watched._names("kv", KEYS[1:2]), True)
    watched.native.exist_answers.extend([overflow] * failing_looks)
    watched.native.get_answers.append(transfer_failed)
    assert get(watched, 0, 1, 2) == [False] * 3
    wait_until(lambda: not watched.is_held(KEYS[1]), what="a look")
    assert not watched.native.exist_answers
    assert (watched.take_removed(), held(watched)) == ([KEYS[1]], [0, 2])


@pytest.mark.parametrize(("ours", "theirs"), [(2, 4), (4, 2)])
def test_without_a_fingerprint_pages_of_another_layout_are_a_miss_and_stay(open_pages, ours, theirs):
    """ours, theirs: page sizes of two engines that cannot read each other's pages."""
    identity = replace(own_identity(), use_fingerprint=False)
    writer, reader = open_pages(identity, page_size=ours), open_pages(identity, page_size=theirs)
    assert put(writer, 0, 1) == [True, True]
    assert get(reader, 0, 1) == [False, False]
    assert (reader.get_stats().num_missed, reader.get_stats().num_damaged) == (2, 0)
    assert get(writer, 0, 1) == [True, True]
