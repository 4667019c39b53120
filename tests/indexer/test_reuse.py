"""The reusable part of a match, according to group streams."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespace, Namespaces
from indexer.scores import WorkerScore, score_all
from indexer.settings import IndexerSettings
from indexer.snapshots import image
from kv_events.records import LogRecord
from kv_events.schema import CLOSED, NUM_MEDIA
from kv_events.streams import StreamId
from tests.support.effort import num_examples
from tests.support.log.records import Stream, removed, stored
from tests.support.log.reuse_oracle import num_reusable

PROMPT = np.arange(1, 11, dtype=np.uint64)
SETTINGS = IndexerSettings(max_pages=1000)


class Views:
    """Views made by hand. By default, the last batch of every stream has just arrived; `now` changes this."""

    def __init__(self) -> None:
        self.namespaces = Namespaces(SETTINGS)
        self._applier = Applier(self.namespaces, DeadLetters())
        self.freshness = Freshness(10.0, 100.0)

    def hold(self, stream: Stream, *pages: int, tier: int = 0, now: float = 100.0) -> None:
        self.apply(stream, stored((0, pages), tier=tier) if pages else None, now=now)

    def apply(self, stream: Stream, event: Any = None, now: float = 100.0) -> None:
        self.take(stream.batch(*([] if event is None else [event]), now=now), now)

    def close(self, stream: Stream, now: float = 100.0) -> None:
        self.take(stream.batch(now=now, degraded_reason=CLOSED), now)

    def take(self, record: LogRecord, now: float = 100.0) -> None:
        for _ in self._applier.apply(record, now):
            pass

    def scores(self, prompt: np.ndarray = PROMPT) -> dict[str, WorkerScore]:
        found = score_all(self.namespaces.find("m", "default"), lambda _: prompt, self.freshness)
        return {score.worker: score for score in found}

    def reusable(self, prompt: np.ndarray = PROMPT) -> dict[str, int]:
        return {worker: score.longest_matched for worker, score in self.scores(prompt).items()}


@pytest.fixture
def views() -> Views:
    return Views()


def mamba(worker: str = "w0", **more: Any) -> Stream:
    return Stream(worker, model="m#mamba", **more)


def swa(window: int, worker: str = "w0") -> Stream:
    return Stream(worker, model=f"m#swa:{window}")


def test_a_prefix_ends_at_the_last_page_with_a_state(views: Views) -> None:
    views.hold(Stream(), *range(1, 9))
    views.hold(mamba(), 2, 5, 9)
    assert views.reusable() == {"w0": 5 * 4}


def test_a_state_on_any_tier_counts_and_one_that_has_left_them_all_does_not(views: Views) -> None:
    states = mamba()
    views.hold(Stream(), *range(1, 9))
    views.hold(states, 7, tier=0)
    views.hold(states, 7, tier=1)
    views.apply(states, removed([7], tier=0))
    assert views.reusable() == {"w0": 28}
    views.apply(states, removed([7], tier=1))
    assert views.reusable() == {}


def test_a_worker_without_group_streams_can_reuse_all_that_is_matched(views: Views) -> None:
    for worker in ("plain", "hybrid"):
        views.hold(Stream(worker), 1, 2, 3)
    views.hold(mamba("hybrid"), 2)
    assert views.reusable() == {"plain": 12, "hybrid": 8}


def test_a_worker_is_as_good_as_its_best_rank(views: Views) -> None:
    for rank, (pages, state) in enumerate(((6, 2), (4, 4), (3, None))):
        views.hold(Stream(dp_rank=rank), *range(1, pages + 1))
        if state is not None:
            views.hold(mamba(dp_rank=rank), state)
    score = views.scores()["w0"]
    assert {rank: tiers.external for rank, tiers in score.ranks.items()} == {0: 8, 1: 16, 2: 12}
    assert score.longest_matched == 16


def test_each_tier_counts_what_is_reusable_from_it(views: Views) -> None:
    views.hold(Stream(), 1, 2, 3, 4)
    views.hold(states := mamba(), 2, tier=0)
    views.hold(states, 3, tier=1)
    assert views.scores()["w0"].tiers == (8, 12, 12, 12)
    views.apply(states, removed([3], tier=1))
    assert views.scores()["w0"].tiers == (8, 8, 8, 8)


def test_a_worker_from_which_nothing_can_be_reused_has_no_score(views: Views) -> None:
    views.hold(Stream(), 1, 2, 3)
    views.hold(mamba())
    assert views.scores() == {}


@pytest.mark.parametrize(("num_positions", "expected"), [(None, 16), (17, 16), (16, 8)])
def test_the_last_token_is_always_computed(views: Views, num_positions: int | None, expected: int) -> None:
    views.hold(Stream(), 1, 2, 3, 4)
    views.hold(mamba(), 2, 4)
    (score,) = score_all(views.namespaces.find("m", "default"), lambda _: PROMPT[:4], views.freshness, num_positions)
    assert score.longest_matched == expected


def test_a_view_is_as_trusted_as_those_of_its_groups(views: Views) -> None:
    views.hold(Stream(), 1)
    states = mamba()
    views.hold(states, 1)
    assert views.scores()["w0"].state == "live"
    views.take(states.batch(digest=bytes(64), now=100.0))
    assert views.scores()["w0"].state == "stale"


def test_a_group_stream_that_was_closed_no_longer_counts(views: Views) -> None:
    states = mamba()
    views.hold(Stream(), 1, 2)
    views.hold(states, 1)
    assert views.reusable() == {"w0": 4}
    views.close(states)
    assert views.reusable() == {"w0": 8}


@pytest.mark.parametrize(
    ("window", "held", "expected"),
    [
        (9, (1, 2, 3, 5, 6, 7), 7),  # three pages of 4
        (8, (1, 2, 4, 5), 5),
        (9, (1, 2, 4, 5), 2),  # shorter than the window, but all of it
        (9, (2, 3, 5, 6, 8), 0),
        (1, (3, 8), 8),
        (400, (1, 2, 3, 4, 5, 6, 7, 8), 8),
        (400, (2, 3, 4, 5, 6, 7, 8), 0),
    ],
)
def test_a_prefix_ends_where_a_window_is_whole(views: Views, window: int, held: tuple[int, ...], expected: int) -> None:
    views.hold(Stream(), *range(1, 9))
    views.hold(swa(window), *held)
    assert views.reusable() == ({"w0": expected * 4} if expected else {})


def test_a_prefix_ends_where_all_groups_agree(views: Views) -> None:
    views.hold(Stream(), *range(1, 10))
    views.hold(mamba(), 3, 5, 8)
    views.hold(swa(8), 2, 3, 5, 7, 9)
    assert views.reusable() == {"w0": 12}


def test_an_expired_group_stream_holds_nothing(views: Views) -> None:
    views.hold(mamba(), 1, 2, now=80.0)
    views.hold(mamba("fresh"), 1)
    for worker in ("w0", "fresh"):
        views.hold(Stream(worker), 1, 2)
    views.freshness = Freshness(10.0, 85.0)
    for tick in range(85, 101):
        views.freshness.note_log_read(float(tick))
    assert views.reusable() == {"fresh": 4}


def test_an_expired_group_stream_of_an_earlier_life_does_not_count(views: Views) -> None:
    own = Stream()
    views.hold(mamba(), 1, now=80.0)
    own.restart()
    views.hold(own, 1, 2)
    assert views.reusable() == {"w0": 4}
    views.freshness = Freshness(10.0, 85.0)
    for tick in range(85, 101):
        views.freshness.note_log_read(float(tick))
    assert views.reusable() == {"w0": 8}


def test_groups_that_disagree_at_every_page_cost_little_and_give_no_score(views: Views) -> None:
    """Each round of agreement would shorten the prefix by one page."""
    pages = range(1, 900)
    views.hold(Stream(), *pages)
    views.hold(mamba(), *pages[::2])
    views.hold(swa(1), *pages[1::2])
    assert views.reusable(np.arange(1, 900, dtype=np.uint64)) == {}


def test_groups_of_another_tenant_block_size_or_model_do_not_count(views: Views) -> None:
    views.hold(Stream(), 1, 2)
    views.hold(Stream(model="m#mamba", tenant="other"), 1)
    views.hold(Stream(model="m#mamba", block_size=8, worker="w1"), 1)
    views.hold(Stream(model="m2#mamba"), 1)
    assert views.reusable() == {"w0": 8}


def test_a_model_with_a_hash_in_its_name_is_no_group(views: Views) -> None:
    views.hold(Stream(), 1, 2)
    views.hold(Stream(model="m#v2"), 1)
    assert views.reusable() == {"w0": 8}


def test_ranks_of_other_block_sizes_are_summed_up(views: Views) -> None:
    views.hold(Stream(block_size=4), 1, 2, 3)
    views.hold(mamba(block_size=4), 2)
    views.hold(Stream(block_size=8, dp_rank=1), 1)
    assert {rank: tiers.external for rank, tiers in views.scores()["w0"].ranks.items()} == {0: 8, 1: 8}


# --- namespaces are added and removed in any order ---


def linked(namespaces: Namespaces) -> dict[str, list[str]]:
    return {namespace.key.model: sorted(namespace.groups) for namespace in namespaces}


def forget(namespaces: Namespaces, model: str) -> None:
    for _ in namespaces.forget(StreamId(model, "default", "w0", 0)):
        pass


@pytest.mark.parametrize("models", [["m", "m#mamba", "m#swa:4"], ["m#swa:4", "m#mamba", "m"]])
def test_groups_are_found_whatever_is_made_first(views: Views, models: list[str]) -> None:
    for model in models:
        views.hold(Stream(model=model), 1)
    groups = {"m": ["mamba", "swa:4"], "m#mamba": [], "m#swa:4": []}
    assert linked(views.namespaces) == groups
    assert [views.namespaces.is_group(each) for each in views.namespaces] == [model != "m" for model in models]


def test_namespaces_that_go_and_come_back_are_linked_again(views: Views) -> None:
    for model in ("m", "m#mamba"):
        views.hold(Stream(model=model), 1)
    forget(views.namespaces, "m")
    (group,) = views.namespaces
    assert not views.namespaces.is_group(group)
    views.hold(Stream(), 1)
    assert linked(views.namespaces) == {"m#mamba": [], "m": ["mamba"]}
    forget(views.namespaces, "m#mamba")
    assert views.reusable() == {"w0": 4}
    assert linked(views.namespaces) == {"m": []}
    forget(views.namespaces, "m")
    assert (list(views.namespaces), views.namespaces.tenants) == ([], [])


def test_a_snapshot_brings_groups_back(views: Views) -> None:
    views.hold(mamba(), 2)
    views.hold(Stream(), 1, 2, 3)
    taking = image.take(views.namespaces, {}, 100.0)
    while True:
        try:
            next(taking)
        except StopIteration as end:
            views.namespaces = image.unpack(b"".join(end.value.pack()), SETTINGS).namespaces
            break
    views.freshness = Freshness(10.0, 100.0)
    namespace: Namespace
    (namespace,) = views.namespaces.find("m", "default")
    assert list(namespace.groups) == ["mamba"]
    assert views.reusable() == {"w0": 8}


# --- any groups, compared with sets -----------------------------------------------------------------------------------


PAGE = 4
GROUPS = ["mamba", "swa:1", "swa:12", "swa:100", "swa:9", "swa:17/8", "chunk:16", "chunk:10", "eagle", "nofull"]
MARKS = {"eagle", "nofull", "step:8"}
"""Groups without pages."""
LENGTHS = st.integers(0, 40)


@settings(max_examples=num_examples(300))
@given(data=st.data(), num_workers=st.sampled_from([1, 3, 70]), base_first=st.booleans())
def test_what_can_be_reused_is_what_a_count_by_hand_finds(
    data: st.DataObject, num_workers: int, base_first: bool
) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    prompt = random.integers(1, 2**64, data.draw(LENGTHS), dtype=np.uint64)
    names = data.draw(st.lists(st.sampled_from(GROUPS), unique=True, max_size=3))
    if "swa:17/8" in names:
        names.append("step:8")
    density = data.draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    num_positions = data.draw(st.none() | st.integers(len(prompt) * PAGE, (len(prompt) + 1) * PAGE - 1))
    # rank -> name of the stream ("": the main one) -> page -> tier
    streams: dict[tuple[str, int], dict[str, dict[int, int]]] = defaultdict(dict)
    records = []
    for number in range(num_workers):
        rank = (f"w{number // 2}", number % 2)
        for name in ["", *(name for name in names if random.random() < 0.9 or name == "step:8")]:
            chance = 0.0 if name in MARKS else density if name else 1.0
            marked = prompt[random.random(len(prompt)) < chance]
            if not name:
                marked = prompt[: random.integers(0, len(prompt) + 1)]
            streams[rank][name] = {int(page): int(random.integers(NUM_MEDIA)) for page in marked}
            stream = Stream(rank[0], model=f"m#{name}" if name else "m", dp_rank=rank[1])
            by_tier = [[page for page, on in streams[rank][name].items() if on == tier] for tier in range(NUM_MEDIA)]
            events = [stored((0, pages), tier=tier) for tier, pages in enumerate(by_tier) if pages]
            records.append((name, stream.batch(*events, now=1.0)))
    namespaces = Namespaces(IndexerSettings(max_pages=1000))
    applier = Applier(namespaces, DeadLetters())
    for _, record in sorted(records, key=lambda each: bool(each[0]) == base_first):
        for _ in applier.apply(record, 1.0):
            pass
    freshness = Freshness(10.0, 1.0)
    found = score_all(namespaces.find("m", "default"), lambda _: prompt, freshness, num_positions)
    answered = {(score.worker, rank): tuple(tiers) for score in found for rank, tiers in score.ranks.items()}
    most = None if num_positions is None else max(0, num_positions - 1) // PAGE
    expected = {
        rank: tuple(
            PAGE * num_reusable(prompt.tolist(), on_tiers(held, tier).pop(""), groups_on(held, tier), PAGE, most)
            for tier in range(NUM_MEDIA)
        )
        for rank, held in streams.items()
    }
    assert answered == {rank: tiers for rank, tiers in expected.items() if tiers[-1]}
    for score in found:
        assert score.longest_matched == max(expected[score.worker, rank][-1] for rank in score.ranks)


def on_tiers(held: dict[str, dict[int, int]], slowest: int) -> dict[str, set[int]]:
    """Return the pages of each stream on a tier or a faster one."""
    return {name: {page for page, tier in pages.items() if tier <= slowest} for name, pages in held.items()}


def groups_on(held: dict[str, dict[int, int]], slowest: int) -> dict[str, set[int]]:
    return {name: pages for name, pages in on_tiers(held, slowest).items() if name}
