"""What can be reused against a count over sets, tier by tier, for random workers, ranks, groups and holes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.scores import score_all
from indexer.settings import IndexerSettings
from kv_events.schema import NUM_MEDIA
from tests.support.effort import num_examples
from tests.support.log.records import Stream, stored
from tests.support.log.reuse_oracle import num_reusable

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
