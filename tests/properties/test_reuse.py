"""Reusable prefixes against a count over sets, for random workers, ranks, groups and holes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.applier import Applier
from indexer.dead_letters import DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.questions import score_all
from indexer.settings import IndexerSettings
from tests.support.effort import num_examples
from tests.support.log.records import Stream, stored
from tests.support.log.reuse_oracle import num_reusable

PAGE = 4
GROUPS = ["mamba", "swa:1", "swa:12", "swa:100", "swa:9"]
LENGTHS = st.integers(0, 40)


@settings(max_examples=num_examples(150))
@given(data=st.data(), num_workers=st.sampled_from([1, 3, 70]), base_first=st.booleans())
def test_what_can_be_reused_is_what_a_count_by_hand_finds(
    data: st.DataObject, num_workers: int, base_first: bool
) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    prompt = random.integers(1, 2**64, data.draw(LENGTHS), dtype=np.uint64)
    names = data.draw(st.lists(st.sampled_from(GROUPS), unique=True, max_size=3))
    density = data.draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    streams: dict[tuple[str, int], tuple[set[int], dict[str, set[int]]]] = {}
    records = []
    for number in range(num_workers):
        rank = (f"w{number // 2}", number % 2)
        held = prompt[: random.integers(0, len(prompt) + 1)].tolist()
        groups = {
            name: set(prompt[random.random(len(prompt)) < density].tolist()) for name in names if random.random() < 0.9
        }
        streams[rank] = set(held), groups
        for model, pages in (("m", held), *((f"m#{name}", sorted(marked)) for name, marked in groups.items())):
            stream = Stream(rank[0], model=model, dp_rank=rank[1])
            parts = np.array_split(np.array(pages, np.uint64), 4)  # tier by tier
            events = [stored((0, part.tolist()), tier=tier) for tier, part in enumerate(parts) if len(part)]
            records.append((model, stream.batch(*events, now=1.0)))
    namespaces = Namespaces(IndexerSettings(max_pages=1000))
    applier = Applier(namespaces, DeadLetters())
    for _, record in sorted(records, key=lambda each: (each[0] == "m") != base_first):
        for _ in applier.apply(record, 1.0):
            pass
    found = score_all(namespaces.find("m", "default"), lambda _: prompt, Freshness(10.0, 1.0))
    answered = {
        (score.worker, rank): (score.reusable_by_rank or {}).get(rank, tiers.external) // PAGE
        for score in found
        for rank, tiers in score.ranks.items()
    }
    expected = {rank: num_reusable(prompt.tolist(), kv, groups, PAGE) for rank, (kv, groups) in streams.items()}
    assert answered == {
        rank: pages for rank, pages in expected.items() if prompt[:1].tolist() and prompt[0] in streams[rank][0]
    }
    for score in found:
        own = [expected[score.worker, rank] for rank in score.ranks]
        assert score.reusable == max(own) * PAGE
        has_groups = any(streams[score.worker, rank][1] for rank in score.ranks)
        assert score.has_groups == has_groups
