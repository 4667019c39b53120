"""One simulated engine with each kind of cache, its disk, and the comparison of its cache with a view."""

from collections.abc import Callable

import numpy as np
import pytest

from engine_cache import BytelessHostPool, EvictParams
from engine_cache.storage import PoolHitPolicy, PoolName, PoolTransfer, StorageClosedError, page_key
from kv_events.errors import InvalidValueError
from kv_events.hashing import sequence_hashes
from kv_events.schema import BlockStored, StorageMedium
from simulation import CACHES, Request, SimulatedWorker
from simulation.caches import BytelessStore
from simulation.run import TimedFleet
from tests.models.cache_checks import check_cache
from tests.support.log.records import words

NO_ROWS = np.zeros(0, np.int64)
TIERED = ["hiradix", "himamba"]
HYBRID = ["mamba", "himamba"]


@pytest.fixture(autouse=True)
def _watched_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_cache.settings.CHECK_FREES", True)


@pytest.fixture
def make_worker(make_fleet) -> Callable[..., SimulatedWorker]:
    """Creates a worker with pages of 16 tokens and room for 64 pages on the device, 97 on the host and 512 on disk."""

    def make(cache: str, **changes: object) -> SimulatedWorker:
        fleet: TimedFleet = make_fleet(workers=1, cache=cache, **{"host_ratio": 1.5, **changes})
        return fleet.run.workers[0]

    return make


def _pages(worker: SimulatedWorker, medium: StorageMedium) -> set[int]:
    if medium is StorageMedium.DISK:
        assert worker.tiers is not None
        return set(worker.tiers.on_disk()[0].tolist())
    return {page.sequence_hash for page in worker.cache.iter_resident(medium)}


def _where(worker: SimulatedWorker, request: Request) -> list[set[int]]:
    """Return, for each page of the prompt, the media that hold it as indices of GPU, CPU, DISK."""
    media = [_pages(worker, medium) for medium in (StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK)]
    hashes = sequence_hashes(request.token_ids, 16).tolist()
    return [{i for i, pages in enumerate(media) if page in pages} for page in hashes]


@pytest.mark.parametrize("cache", CACHES)
def test_what_was_served_is_found_again_and_its_output_by_the_next_turn(make_worker, prompts, cache: str) -> None:
    worker, request = make_worker(cache), Request(0.0, prompts.tokens(100), prompts.tokens(60))
    short = worker.serve(prompts.request(15))  # no whole page
    assert (short.found_tokens, short.is_cut) == (0, False)
    assert _pages(worker, StorageMedium.GPU) == set()
    assert worker.serve(request).found_tokens == 0
    assert worker.serve(request).found_tokens == 96
    following = np.concatenate((request.token_ids, request.output_tokens, prompts.tokens(30)))
    assert worker.serve(Request(1.0, following)).found_tokens == 160


@pytest.mark.parametrize("cache", HYBRID)
def test_a_prefix_that_two_prompts_shared_has_a_state_for_the_third(make_worker, prompts, cache: str) -> None:
    worker = make_worker(cache)
    system = prompts.tokens(128)
    found = [worker.serve(Request(0.0, np.concatenate((system, prompts.tokens(64))))).found_tokens for _ in range(3)]
    assert found == [0, 0, 128]


@pytest.mark.parametrize(
    ("others", "changes", "tiers", "found"),
    [(1, {}, {1, 2}, 512), (2, {}, {2}, 512), (2, {"disk_ratio": 0.5}, set(), 0)],
    ids=["left the device", "left the host", "left the disk"],
)
@pytest.mark.parametrize("cache", TIERED)
def test_a_prompt_is_found_on_the_tiers_that_it_has_not_left(
    make_worker, prompts, cache: str, others: int, changes: dict[str, float], tiers: set[int], found: int
) -> None:
    worker, request = make_worker(cache, **changes), prompts.request(512)
    worker.serve(request)
    for _ in range(others):
        worker.serve(prompts.request(960))
    assert _where(worker, request) == [tiers] * 32
    assert worker.serve(request).found_tokens == found
    assert _where(worker, request) == [{0, 1, 2}] * 32


@pytest.mark.parametrize("cache", CACHES)
def test_a_request_beyond_the_capacity_keeps_its_beginning(make_worker, prompts, cache: str) -> None:
    worker = make_worker(cache)
    request = prompts.request(3000)
    assert worker.serve(request).is_cut
    assert len(_pages(worker, StorageMedium.GPU)) == 64
    assert worker.serve(request).found_tokens == 1024


@pytest.mark.parametrize("cache", CACHES)
def test_cache_and_view_are_in_order_after_every_request(make_fleet, prompts, cache: str) -> None:
    fleet: TimedFleet = make_fleet(workers=1, cache=cache, host_ratio=1.0, disk_ratio=3.0)
    worker = fleet.run.workers[0]
    talks = [prompts.tokens(n) for n in (40, 200, 500, 900)]
    for turn in range(60):
        number = int(prompts.random.integers(len(talks)))
        talk = talks[number][: prompts.random.integers(20, 1500)]
        output = prompts.tokens(prompts.random.integers(200))
        worker.serve(Request(float(turn), talk, output, extra_key="tenant" if number == 1 else None))
        talks[number] = np.concatenate((talk, output, prompts.tokens(30)))
        check_cache(worker.cache, NO_ROWS)
        fleet.deliver(0)
        assert fleet.run.report(0.0).divergent_pages == 0


@pytest.mark.parametrize("cache", TIERED)
def test_every_copy_has_ended_when_a_request_is_served(make_worker, prompts, cache: str) -> None:
    worker = make_worker(cache)
    for length in (300, 700, 900, 300):
        worker.serve(prompts.request(length))
        tree = worker.cache
        assert not any((tree.ongoing_write_through, tree.ongoing_load_back, tree.ongoing_backup))
        assert not tree.ongoing_prefetch
        assert not tree.prefetch_loaded_tokens_by_reqid


def test_found_tokens_are_the_longest_shared_prefix_in_whole_pages(make_worker, prompts) -> None:
    worker = make_worker("radix", capacity_tokens=2**16)
    served: list[np.ndarray] = []
    for _ in range(60):
        old = served[prompts.random.integers(len(served))] if served else prompts.tokens(0)
        kept = old[: prompts.random.integers(len(old) + 1)]
        request = Request(0.0, np.concatenate((kept, prompts.tokens(20))), prompts.tokens(prompts.random.integers(40)))
        expected = max((_shared(request.token_ids, other) // 16 * 16 for other in served), default=0)
        assert worker.serve(request).found_tokens == expected
        served.append(np.concatenate((request.token_ids, request.output_tokens)))


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    length = 0
    for a, b in zip(one.tolist(), other.tolist(), strict=False):
        if a != b:
            break
        length += 1
    return length


def test_a_request_that_fits_is_not_cut_even_if_all_else_has_to_go(make_worker, prompts) -> None:
    worker = make_worker("radix")
    worker.serve(prompts.request(1000))
    assert not worker.serve(prompts.request(1024)).is_cut


# --- the comparison of a cache with its view ---


def lost_on_device(worker: SimulatedWorker) -> None:
    worker.cache.evict(EvictParams(160))


def only_told_on_host(worker: SimulatedWorker) -> None:
    worker.publisher.publish([BlockStored([7], None, [], 16, None, StorageMedium.CPU, None, words([77]))])


def lost_on_disk(worker: SimulatedWorker) -> None:
    worker.tiers.store.clear()  # type: ignore[union-attr]


def only_held_on_disk(worker: SimulatedWorker) -> None:
    worker.tiers.store.batch_set_v1([page_key("0" * 64)], np.arange(16))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("cache", "silent", "then", "pages"),
    [
        ("radix", None, None, 0),
        ("hiradix", None, None, 0),
        ("radix", None, only_told_on_host, 1),
        ("radix", lost_on_device, None, 10),
        ("hiradix", lost_on_disk, None, 10),
        ("hiradix", only_held_on_disk, None, 1),
    ],
)
def test_pages_that_cache_and_view_do_not_both_hold_count(make_fleet, prompts, cache, silent, then, pages) -> None:
    fleet: TimedFleet = make_fleet(workers=1, cache=cache)
    (worker,) = fleet.run.workers
    worker.serve(prompts.request(160))
    assert fleet.run.report(0.0).divergent_pages == (30 if cache == "hiradix" else 10), "none was delivered"
    if then is not None:
        then(worker)
    fleet.deliver(0)
    if silent is not None:
        silent(worker)
    assert fleet.run.report(0.0).divergent_pages == pages


# --- a disk that keeps only keys ---


KEYS = [page_key(f"{i:064x}") for i in range(8)]


def _store(capacity_pages: int = 4) -> BytelessStore:
    store = BytelessStore(capacity_pages)
    store.register_mem_pool_host(BytelessHostPool(64, 2))  # type: ignore[arg-type]  # it moves no bytes
    store.register_mem_host_pool_v2(BytelessHostPool(64, 1), PoolName.MAMBA)  # type: ignore[arg-type]
    return store


def _put(store: BytelessStore, keys: list[str]) -> list[bool]:
    return store.batch_set_v1(keys, np.arange(2 * len(keys)))


def test_what_was_written_is_there_and_nothing_else() -> None:
    store = _store()
    assert _put(store, KEYS[:3]) == [True] * 3
    assert store.batch_exists([*KEYS[:3], KEYS[4]]) == 3
    assert store.batch_get_v1(KEYS[2:4], np.arange(4)) == [True, False]
    assert store.held_keys() == set(KEYS[:3])


def test_the_pages_used_longest_ago_go_and_of_a_prefix_those_at_its_end() -> None:
    store = _store()
    _put(store, KEYS[:2])
    _put(store, KEYS[2:4])
    store.batch_get_v1(KEYS[:2], np.arange(4))
    _put(store, KEYS[4:5])
    assert store.take_removed() == [KEYS[3]]
    _put(store, KEYS[5:7])
    assert store.take_removed() == [KEYS[2], KEYS[1]]
    assert store.held_keys() == {KEYS[0], *KEYS[4:7]}


def test_a_batch_beyond_the_capacity_keeps_its_beginning_and_a_page_that_came_back_was_not_lost() -> None:
    store = _store(capacity_pages=1)
    assert _put(store, KEYS[:2]) == [True, False]
    _put(store, KEYS[1:2])
    _put(store, KEYS[:1])
    assert (store.take_removed(), store.take_removed()) == ([KEYS[1]], [])


def test_a_state_goes_with_its_page() -> None:
    store = _store(capacity_pages=1)
    store.batch_set_v2([PoolTransfer(PoolName.MAMBA, np.array([1]), keys=KEYS[:1])])
    assert not store.is_held(KEYS[0])
    _put(store, KEYS[:1])
    state = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert store.batch_exists_v2(KEYS[:1], [state]).kv_hit_pages == 1
    _put(store, KEYS[1:2])
    assert store.batch_exists_v2(KEYS[1:2], [state]).kv_hit_pages == 0
    assert store.get_stats().num_evicted == 2


def test_clearing_is_no_loss_and_closing_ends_it() -> None:
    store = _store()
    _put(store, KEYS[:3])
    store.clear()
    assert (store.held_keys(), store.take_removed()) == (set(), [])
    store.close()
    with pytest.raises(StorageClosedError):
        store.is_held(KEYS[0])
    with pytest.raises(InvalidValueError, match="capacity_pages"):
        BytelessStore(0)
