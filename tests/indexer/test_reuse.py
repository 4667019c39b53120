"""The reusable part of a match, according to group streams."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.namespaces import Namespaces
from indexer.scores import StreamReuse, WorkerScore, score_all, stream_reuse
from indexer.slices import run_at_once
from indexer.snapshots import image
from indexer.views import View, ViewState
from kv_events.hashing import U64Array
from kv_events.schema import CLOSED, NUM_MEDIA, WireEvent
from kv_events.streams import StreamId
from tests.rigs.views import Views
from tests.support.effort import num_examples
from tests.support.log.records import Stream, removed, stored
from tests.support.log.reuse_oracle import num_reusable

PROMPT = np.arange(1, 11, dtype=np.uint64)


class GroupViews(Views):
    """Views of the namespace m and of its groups. Batches arrive now unless a test says otherwise."""

    def hold(self, stream: Stream, *pages: int, tier: int = 0) -> None:
        self.send(stream, *([stored((0, pages), tier=tier)] if pages else []))

    def send(self, stream: Stream, *events: WireEvent, **more: Any) -> None:
        self.read_now(stream.batch(*events, now=self.now, **more))

    def scores(self, prompt: U64Array = PROMPT) -> dict[str, WorkerScore]:
        found = score_all(self.applier.namespaces.find("m", "default"), lambda _: prompt, self.freshness)
        return {score.worker: score for score in found}

    def reusable(self, prompt: U64Array = PROMPT) -> dict[str, int]:
        found = {worker: score.longest_matched for worker, score in self.scores(prompt).items()}
        for view, alone in self.explained(prompt):
            assert alone.lengths[-1] * view.block_size == found.get(view.stream.worker, 0)
        return found

    def explained(self, prompt: U64Array = PROMPT) -> list[tuple[View, StreamReuse]]:
        """What `explain` says of each stream that has not expired."""
        return [
            (view, stream_reuse(namespace, view, prompt, self.freshness, None))
            for namespace in self.applier.namespaces.find("m", "default")
            for view in namespace.by_rank.values()
            if self.freshness.state(view) is not ViewState.EXPIRED
        ]

    def expired_groups(self) -> dict[str, set[str]]:
        return {view.stream.worker: set(found.expired) for view, found in self.explained()}


@pytest.fixture
def views() -> GroupViews:
    return GroupViews(100.0, max_pages=1000)


def mamba(worker: str = "w0", **more: Any) -> Stream:
    return Stream(worker, model="m#mamba", **more)


def test_a_view_is_as_trusted_as_those_of_its_groups(views: GroupViews) -> None:
    views.hold(Stream(), 1)
    states = mamba()
    views.hold(states, 1)
    assert views.scores()["w0"].state == "live"
    views.send(states, digest=bytes(64))
    assert views.scores()["w0"].state == "stale"


def test_a_group_stream_that_was_closed_no_longer_counts(views: GroupViews) -> None:
    states = mamba()
    views.hold(Stream(), 1, 2)
    views.hold(states, 1)
    assert views.reusable() == {"w0": 4}
    views.send(states, degraded_reason=CLOSED)
    assert views.reusable() == {"w0": 8}
    assert views.expired_groups() == {"w0": set()}


def test_an_expired_group_stream_holds_nothing_unless_it_is_of_an_earlier_life(views: GroupViews) -> None:
    reborn = Stream("reborn")
    for worker in ("gone", "reborn"):
        views.hold(mamba(worker), 1, 2)
    views.wait(5)
    reborn.restart()
    views.hold(mamba("fresh"), 1)
    for stream in (Stream("gone"), Stream("fresh"), reborn):
        views.hold(stream, 1, 2)
    assert views.reusable() == {"gone": 8, "fresh": 4, "reborn": 8}
    views.read_now(mamba("reborn").batch(removed([2]), now=views.now))
    views.wait(6)
    assert views.reusable() == {"fresh": 4, "reborn": 8}
    assert views.expired_groups() == {"gone": {"mamba"}, "fresh": set(), "reborn": set()}


def test_groups_that_disagree_at_every_page_cost_little_and_give_no_score(views: GroupViews) -> None:
    """Each round of agreement would shorten the prefix by one page."""
    pages = range(1, 900)
    views.hold(Stream(), *pages)
    views.hold(mamba(), *pages[::2])
    views.hold(Stream(model="m#swa:1"), *pages[1::2])
    assert views.reusable(np.arange(1, 900, dtype=np.uint64)) == {}


def test_a_window_of_large_blocks_may_leave_a_slower_tier_with_less_whatever_was_asked_before(
    views: GroupViews,
) -> None:
    full, window, states = Stream(), Stream(model="m#swa:8/8"), mamba()
    views.hold(full, *range(1, 8), tier=0)
    views.hold(full, *range(1, 9), tier=1)
    views.hold(window, 1, 2, 3, 5, 7)
    views.hold(states, 2, 7)
    expected = views.scores()["w0"].tiers
    assert expected == (28, 8, 8, 8)
    views.reusable(PROMPT[::-1].copy())
    views.reusable(PROMPT + 5)
    assert views.scores()["w0"].tiers == expected


def test_groups_of_another_tenant_block_size_or_model_do_not_count(views: GroupViews) -> None:
    views.hold(Stream(), 1, 2)
    views.hold(Stream(model="m#mamba", tenant="other"), 1)
    views.hold(Stream(model="m#mamba", block_size=8, worker="w1"), 1)
    views.hold(Stream(model="m2#mamba"), 1)
    assert views.reusable() == {"w0": 8}


def test_a_model_with_a_hash_in_its_name_is_no_group(views: GroupViews) -> None:
    views.hold(Stream(), 1, 2)
    views.hold(Stream(model="m#v2"), 1)
    assert views.reusable() == {"w0": 8}


def test_ranks_of_other_block_sizes_are_summed_up(views: GroupViews) -> None:
    views.hold(Stream(block_size=4), 1, 2, 3)
    views.hold(mamba(block_size=4), 2)
    views.hold(Stream(block_size=8, dp_rank=1), 1)
    assert {rank: tiers.external for rank, tiers in views.scores()["w0"].ranks.items()} == {0: 8, 1: 8}


# --- namespaces are added and removed in any order ---


def linked(namespaces: Namespaces) -> dict[str, list[str]]:
    return {namespace.key.model: sorted(namespace.groups) for namespace in namespaces}


def forget(namespaces: Namespaces, model: str) -> None:
    run_at_once(namespaces.forget(StreamId(model, "default", "w0", 0)))


@pytest.mark.parametrize("models", [["m", "m#mamba", "m#swa:4"], ["m#swa:4", "m#mamba", "m"]])
def test_groups_are_found_whatever_is_made_first(views: GroupViews, models: list[str]) -> None:
    for model in models:
        views.hold(Stream(model=model), 1)
    groups = {"m": ["mamba", "swa:4"], "m#mamba": [], "m#swa:4": []}
    assert linked(views.applier.namespaces) == groups
    assert [views.applier.namespaces.is_group(each) for each in views.applier.namespaces] == [
        model != "m" for model in models
    ]


def test_namespaces_that_go_and_come_back_are_linked_again(views: GroupViews) -> None:
    for model in ("m", "m#mamba"):
        views.hold(Stream(model=model), 1)
    forget(views.applier.namespaces, "m")
    (group,) = views.applier.namespaces
    assert not views.applier.namespaces.is_group(group)
    views.hold(Stream(), 1)
    assert linked(views.applier.namespaces) == {"m#mamba": [], "m": ["mamba"]}
    forget(views.applier.namespaces, "m#mamba")
    assert views.reusable() == {"w0": 4}
    assert linked(views.applier.namespaces) == {"m": []}
    forget(views.applier.namespaces, "m")
    assert (list(views.applier.namespaces), views.applier.namespaces.tenants) == ([], [])


def test_a_snapshot_brings_groups_back(views: GroupViews) -> None:
    views.hold(mamba(), 2)
    views.hold(Stream(), 1, 2, 3)
    parts = run_at_once(image.take(views.applier.namespaces, {}, 100.0))
    views.applier.namespaces = image.unpack(b"".join(parts.pack()), views.settings).namespaces
    (namespace,) = views.applier.namespaces.find("m", "default")
    assert list(namespace.groups) == ["mamba"]
    assert views.reusable() == {"w0": 8}


# --- any groups, compared with sets -----------------------------------------------------------------------------------


PAGE = 4
GROUPS = ["mamba", "swa:1", "swa:12", "swa:100", "swa:9", "swa:17/8", "chunk:16", "chunk:10", "eagle", "nofull"]
MARKS = {"eagle", "nofull", "step:8"}
"""Groups without pages."""
LENGTHS = st.integers(0, 40)


@settings(max_examples=num_examples(120))
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
    views = Views(1.0, max_pages=1000)
    views.read(*(record for _, record in sorted(records, key=lambda each: bool(each[0]) == base_first)))
    namespaces = views.applier.namespaces.find("m", "default")
    found = score_all(namespaces, lambda _: prompt, views.freshness, num_positions)
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
