import numpy as np
import pytest

from engine_cache import (
    CacheStateError,
    EvictParams,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    RadixKey,
    ReqToTokenPool,
    Request,
)
from tests.support.caches.checks import check_cache

PAGE = 4
NOTHING = np.empty(0, np.int64)


class Engine:
    """A minimal scheduler for a cache: it allocates rows for tokens, page by page."""

    def __init__(self, **options):
        self.pool = PagedTokenToKVPoolAllocator(64, PAGE)
        self.lines = ReqToTokenPool(4, 64)
        self.cache = RadixCache(page_size=PAGE, allocator=self.pool, req_to_token_pool=self.lines, **options)

    def start(self, tokens):
        req = Request("r", [], self.lines.alloc())
        match = self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))
        self.cache.inc_lock_ref(match.last_device_node)
        req.last_node, req.cache_protected_len = match.last_device_node, len(match.device_indices)
        self.lines.write(req.req_pool_idx, 0, match.device_indices)
        req.token_ids = tokens[: len(match.device_indices)]
        self.grow(req, tokens[len(match.device_indices) :])
        return req

    def grow(self, req, tokens):
        have = len(req.token_ids)
        pages = -(-(have + len(tokens)) // PAGE) - -(-have // PAGE)
        tail = self.lines.read(req.req_pool_idx, have)[-1:] if have % PAGE else NOTHING
        rest = np.arange(1, (-have % PAGE) + 1) + tail if len(tail) else NOTHING
        rows = np.concatenate((rest, self.pool.alloc(pages * PAGE)))[: len(tokens)]
        self.lines.write(req.req_pool_idx, have, rows)
        req.token_ids = [*req.token_ids, *tokens]

    def rows(self, req):
        return self.lines.read(req.req_pool_idx, len(req.token_ids))

    def own(self, req):
        return self.rows(req)[req.cache_protected_len :]


def test_a_running_requests_whole_pages_go_to_the_tree_and_stay_locked():
    engine = Engine()
    req = engine.start(list(range(10)))
    engine.cache.cache_unfinished_req(req)
    assert req.cache_protected_len == 8
    assert req.prefix_indices.tolist() == engine.rows(req).tolist()
    assert engine.cache.protected_size() == 8
    assert engine.cache.evict(EvictParams(100)).num_tokens_evicted == 0
    check_cache(engine.cache, engine.own(req))


def test_a_request_goes_over_to_rows_that_were_there_first():
    engine = Engine()
    first, second = engine.start(list(range(8))), engine.start(list(range(8)))
    engine.cache.cache_unfinished_req(first)
    engine.cache.cache_unfinished_req(second)
    assert engine.rows(second).tolist() == engine.rows(first).tolist()
    assert engine.pool.available_size() == 64 - 8
    check_cache(engine.cache, NOTHING)


def test_a_request_cached_chunk_by_chunk_ends_as_one_path():
    engine = Engine()
    req = engine.start(list(range(6)))
    for step in (range(6, 9), range(9, 17)):
        engine.cache.cache_unfinished_req(req, chunked=True)
        check_cache(engine.cache, engine.own(req))
        engine.grow(req, list(step))
    engine.cache.cache_finished_req(req)
    check_cache(engine.cache, NOTHING)
    assert engine.cache.evictable_size() == 16
    assert engine.pool.available_size() == 64 - 16


def test_a_finished_request_leaves_its_pages_unlocked_and_frees_its_tail():
    engine = Engine()
    req = engine.start(list(range(10)))
    engine.cache.cache_finished_req(req)
    assert (engine.cache.evictable_size(), engine.cache.protected_size()) == (8, 0)
    assert req.last_node is None
    check_cache(engine.cache, NOTHING)


def test_a_request_that_is_not_kept_frees_all_it_owns():
    engine = Engine()
    engine.cache.cache_finished_req(engine.start(list(range(8))))
    req = engine.start(list(range(14)))
    engine.cache.cache_finished_req(req, is_insert=False)
    assert engine.cache.evictable_size() == 8
    check_cache(engine.cache, NOTHING)


def test_an_eagle_request_keeps_the_row_of_its_last_token():
    engine = Engine(is_eagle=True)
    req = engine.start(list(range(9)))
    engine.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, len(req.prefix_indices)) == (8, 9)
    check_cache(engine.cache, engine.own(req))
    engine.cache.cache_finished_req(req)
    check_cache(engine.cache, NOTHING)


@pytest.mark.parametrize("is_insert", [False, True])
def test_an_eagle_request_that_has_computed_nothing_leaves_the_tree_its_rows(is_insert):
    """The last unit of its prefix ends with a token that the request does not count yet."""
    engine = Engine(is_eagle=True)
    first = engine.start(list(range(9)))
    engine.cache.cache_finished_req(first)
    req = engine.start(list(range(9)))
    engine.pool.free(engine.own(req))
    req.token_ids = req.token_ids[: req.cache_protected_len]
    rows = engine.rows(req).tolist()
    engine.cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, req.prefix_indices.tolist()) == (8, rows)
    check_cache(engine.cache, engine.own(req))
    engine.cache.cache_finished_req(req, is_insert=is_insert)
    check_cache(engine.cache, NOTHING)


def test_a_disabled_cache_gives_every_row_back():
    engine = Engine(disable=True)
    req = engine.start(list(range(10)))
    engine.cache.cache_unfinished_req(req)
    assert len(req.prefix_indices) == 10
    engine.cache.cache_finished_req(req)
    assert engine.pool.available_size() == 64


def test_requests_need_their_pool():
    with pytest.raises(CacheStateError, match="req_to_token_pool"):
        RadixCache(page_size=4).cache_unfinished_req(Request("r", [1], 0))
