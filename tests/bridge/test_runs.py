"""Alternating stores and removals, and batches decoded together, have the same result as one by one."""

import random
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.decoding.decoder import Batch, Decoder, Messages, UnreadableBatch
from bridge.decoding.events import PageRun, tier_of
from bridge.decoding.kernels.columns import UNKNOWN
from kv_events.codec import RemovedPages, StoredPages, decode_batch
from kv_events.schema import SnapshotBegin, SnapshotEnd
from tests.models.reference_decoder import flat
from tests.rigs.bridge import CPU, DISK, EXTERNAL, GPU, NOW, Rig, on
from tests.support.engines.event_payloads import Event, cleared, names_of, payload, removed, stored

TOKENS = list(range(100, 116))
NAMES = names_of(TOKENS)
HASHES = [11, 12, 13, 14]


def runs_of(*events: Any, **shape: Any) -> list[Any]:
    return [run for run, _ in Decoder().decode(payload(*events, **shape)).runs]


def kinds_of(*events: Any, **shape: Any) -> list[str]:
    runs: list[PageRun] = runs_of(*events, **shape)
    return ["mixed" if run.is_mixed else "removed" if run.is_removal else "stored" for run in runs]


# --- events that form one run ---------------------------------------------------------------------------------------


def test_stores_and_removals_in_turn_come_as_one_run() -> None:
    events = [event for i in range(5) for event in (stored([i], TOKENS[:4]), removed([i]))]
    assert kinds_of(*events) == ["mixed"]


def test_so_do_several_media() -> None:
    events = [stored([i], TOKENS[:4], medium=medium) for i in range(2) for medium in ("GPU", "CPU", "DISK", None)]
    assert kinds_of(*events, removed([1], "GPU")) == ["mixed"]


def test_an_unknown_medium_forms_runs_of_its_own() -> None:
    media = ["GPU", "floppy", "floppy", "SSD", "Cpu", "Cpu", "GPU", "cpu", "FS"]
    runs = runs_of(*(removed([1], medium) for medium in media))
    assert [(len(run.events.lengths), run.events.kinds[0]) for run in runs] == [
        (1, 4), (2, 132), (1, 132), (2, 5), (3, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        stored([9], TOKENS[:8], 8),
        stored([9], TOKENS[:4], lora_name="ad"),
        stored([9], TOKENS[:4], lora_id=1),
        stored([9], TOKENS[:4], cache_salt="s"),
        stored([9], TOKENS[:4], group_idx=1),
        stored([9], TOKENS[:4], kv_cache_spec_kind="cross_attention"),
        stored([9], TOKENS[:4], extra_keys=[["x"]]),
        stored([9], [[1, 2], [2, 3], [3, 4], [4, 5]]),
        stored([9], TOKENS[:3]),
        stored([9], [], 0),
    ],
)
def test_stores_that_state_something_else_do_not_join(other: Event) -> None:
    plain = stored([1], TOKENS[:4])
    assert kinds_of(plain, other, plain, form="map") == ["stored"] * 3
    assert kinds_of(removed([2]), plain, other, form="map")[0] == "mixed"


def test_removals_join_no_store_that_needs_a_look_of_its_own() -> None:
    for odd in (stored([9], [], 0), stored([9], TOKENS[:3]), stored([9], TOKENS[:4], extra_keys=[["x"]])):
        assert kinds_of(removed([2]), odd, removed([2])) == ["removed", "stored", "removed"]


# --- equal results --------------------------------------------------------------------------------------------------


class Noted(Rig):
    """Reports the changes of each page."""

    def changes(self) -> dict[int, list[Any]]:
        """Return the changes since the last call in order, by page. The order of different pages is not significant."""
        publisher = self.translator.publisher
        assert publisher is not None
        result: dict[int, list[Any]] = {}
        for record in publisher.take_records(NOW, force=True):
            for step in decode_batch(record.payload).steps:
                assert isinstance(step, StoredPages | RemovedPages | SnapshotBegin | SnapshotEnd), step
                if isinstance(step, StoredPages | RemovedPages):
                    for name in step.hashes.tolist():
                        result.setdefault(name, []).append((type(step), step.medium))
        publisher.check()
        return result

    def fields(self) -> dict[str, Any]:
        publisher = self.translator.publisher
        assert publisher is not None
        pages = publisher.stats().pages
        del pages["parent_unknown"]  # a run in which a hash is reassigned is stored without links
        return {**asdict(self.counters), **pages}


MEDIA = ["GPU", "GPU", "GPU", None, "CPU", "DISK", "FLOPPY"]


def random_event(rng: random.Random) -> Event:
    """Return an event with few different hashes, so that they repeat. Some are assigned to other pages later."""
    medium, choice = rng.choice(MEDIA), rng.random()
    fields: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "cross_attention"} if choice > 0.97 else {}
    if choice < 0.4:
        return removed([rng.randrange(1, 12) for _ in range(rng.randint(0, 3))], medium, **fields)
    num_pages = rng.randint(1, 3)
    first = rng.randrange(1, 9)
    hashes = [first + page for page in range(num_pages)]
    tokens = [hashes[page] if rng.random() < 0.95 else 99 for page in range(num_pages) for _ in range(2)]
    parent = rng.choice([None, None, first - 1, first - 1, 55]) if first > 1 else None
    if choice > 0.9:
        fields["cache_salt"] = "s"
    if choice > 0.85:
        tokens = tokens[:-1] if choice > 0.88 else []
    return stored(hashes, tokens, 2, parent, medium=medium, **fields)


@given(st.integers(0, 2**32), st.integers(2, 40))
def test_a_batch_means_what_its_events_mean_one_by_one(seed: int, num_events: int) -> None:
    rng = random.Random(seed)
    events = [random_event(rng) for _ in range(num_events)]
    known = stored([1], [1, 1], 2), stored([1], [1, 1], 2, group_idx=1, kv_cache_spec_kind="cross_attention")
    together, alone = Noted().take(*known), Noted().take(*known)
    assert together.changes() == alone.changes()
    together.take(*events, form="map")
    for event in events:
        alone.take(event, form="map")
    assert together.changes() == alone.changes()
    assert together.fields() == alone.fields()


def test_an_unknown_medium_takes_no_other_along() -> None:
    rig = Rig().take(
        stored(HASHES[:1], TOKENS[:4], medium="FLOPPY"),
        stored(HASHES[1:2], TOKENS[4:8], parent=11),
        removed([12], "FLOPPY"),
        stored(HASHES[2:3], TOKENS[8:12], parent=12, medium="CPU"),
    )
    assert rig.pages == on(GPU, NAMES[1:2]) | on(CPU, NAMES[2:3])
    assert rig.counters.unknown_media == {"FLOPPY": 2}
    assert (rig.counters.pages_stored, rig.counters.pages_removed) == (2, 0)


# --- batches decoded together ---------------------------------------------------------------------------------------


def flat_batch(batch: Batch) -> list[Any]:
    """Return the events of a batch, with adjacent removals split into single hashes."""
    events: list[Any] = []
    for run, _ in batch.runs:
        for event in flat(run):
            events += [("removed", h, *event[2:]) for h in event[1]] if event[0] == "removed" else [event]
    return events


one_batch = st.tuples(
    st.lists(
        st.sampled_from([stored([1], TOKENS[:4]), removed([1, 2]), removed([3], "CPU"), stored([2], [], 0), cleared()]),
        max_size=5,
    ),
    st.sampled_from([0, 0, 0, 1, None, "bad"]),
    st.sampled_from(["array", "map", "pair"]),
)


@given(st.lists(one_batch | st.sampled_from([b"", b"\x90", b"\x93\x01\x02\x03"]), max_size=8))
def test_batches_read_together_are_what_they_are_alone(some: list[Any]) -> None:
    payloads = [each if isinstance(each, bytes) else payload(*each[0], rank=each[1], batch=each[2]) for each in some]
    together: list[Any] = []
    num_bad_ranks = 0
    for batch in Decoder().decode_all(Messages.of(enumerate(payloads))):
        if isinstance(batch, UnreadableBatch):
            together.append(("unreadable", batch.number))
        else:
            num_bad_ranks += batch.num_bad_ranks
            together += [(batch.rank, event) for event in flat_batch(batch)]
    alone: list[Any] = []
    for number, data in enumerate(payloads):
        batch = next(Decoder().decode_all(Messages.of(enumerate([data]))))
        if isinstance(batch, UnreadableBatch):
            alone.append(("unreadable", number))
        else:
            num_bad_ranks -= batch.num_bad_ranks
            alone += [(batch.rank, event) for event in flat_batch(batch)]
    assert together == alone
    assert num_bad_ranks == 0


def test_a_batch_of_another_rank_is_no_part_of_the_run_before_it() -> None:
    batches = [
        payload(stored([i], TOKENS[:4]), removed([i], "CPU" if i == 2 else "GPU"), rank=rank)
        for i, rank in enumerate([0, 0, 1, 1, 0])
    ]
    decoded: Any = Decoder().decode_all(Messages.of(enumerate(batches)))
    found = [(batch.rank, num) for batch in decoded for _, num in batch.runs]
    assert found == [(0, 4), (1, 4), (0, 2)]


def test_more_events_than_fit_the_buffer_continue_in_the_next_turn_whatever_their_rank() -> None:
    many = [payload(*(removed([i]) for i in range(3000)), rank=rank) for rank in (0, 0, 1)]
    found: dict[int | None, int] = {}
    for batch in Decoder().decode_all(Messages.of(enumerate(many))):
        assert isinstance(batch, Batch)
        found[batch.rank] = found.get(batch.rank, 0) + sum(num for _, num in batch.runs)
    assert found == {0: 6000, 1: 3000}


def test_a_payload_beyond_the_bound_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.decoding.decoder.MAX_PAYLOAD_BYTES", 1000)
    small, large = payload(removed([1])), msgspec.msgpack.encode([1.0, [["BlockRemoved", list(range(2000))]], 0])
    found = [type(batch) for batch in Decoder().decode_all(Messages.of(enumerate([small, large, small])))]
    assert found == [Batch, UnreadableBatch, Batch]


# --- media ----------------------------------------------------------------------------------------------------------

SEEN = {
    GPU: ["", "GPU", "gpu", "device(type='cuda', index=0)"],
    CPU: ["CPU", "CPU_PINNED", "CPU_TIER1", "cpu"],
    DISK: ["CPU_TIER2", "NVME", "DISK", "FS", "OBJ", "STORAGE", "disk"],
    EXTERNAL: ["EXTERNAL", "REMOTE"],
}


@pytest.mark.parametrize(("medium", "tier"), [(medium, tier) for tier, media in SEEN.items() for medium in media])
def test_a_medium_is_its_tier(medium: str, tier: int) -> None:
    assert tier_of(medium) == tier_of(medium, "LOCAL") == tier
    assert tier_of(medium, "REMOTE") == EXTERNAL


@pytest.mark.parametrize("medium", ["SSD", "NPU", "GPU2", " GPU", "device(type='cpu')"])
def test_an_unknown_medium_is_no_tier(medium: str) -> None:
    assert tier_of(medium) == tier_of(medium, "REMOTE") == UNKNOWN
