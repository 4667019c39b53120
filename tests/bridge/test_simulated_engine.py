"""A simulated engine with random operations in random encodings: the bridge's stream equals its caches."""

import itertools
import random
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.models.stream_reader import Pages
from tests.rigs.bridge import CPU, DISK, GPU, Rig
from tests.support.engines.event_payloads import Event, cleared, names_of, pairs, removed, stored

MEDIA: dict[int, list[str | None]] = {
    GPU: ["GPU", None, "gpu"],
    CPU: ["CPU", "CPU_PINNED", "CPU_TIER1", "cpu"],
    DISK: ["DISK", "FS", "STORAGE", "NVME"],
}
SPACES: list[dict[str, Any]] = [{}, {"lora_name": "ad"}, {"cache_salt": "s"}, {"lora_name": "ad", "cache_salt": "s"}]
MASK64 = 2**64 - 1


class FakeEngine:
    """An engine with a few prompts that share prefixes, in a few namespaces, on three media."""

    def __init__(
        self, rng: random.Random, block_size: int, *, is_bigram: bool, is_vllm: bool, builds_on_held: bool
    ) -> None:
        """builds_on_held: the parent of every store is held."""
        self.rng = rng
        self.builds_on_held = builds_on_held
        self.block_size = block_size
        self.is_bigram = is_bigram
        self.is_vllm = is_vllm  # sends a salt as extra key of a prompt's first page, and mixes it into its hashes
        self.held: dict[tuple[int, int], int] = {}  # (tier, engine's hash) -> sequence hash
        self.copies: Counter[tuple[int, int]] = Counter()  # the same on the device, where each store adds one
        self.known: set[int] = set()  # hashes that were ever stored with their tokens

    @property
    def pages(self) -> Pages:
        return {(tier, name) for (tier, _), name in self.held.items()}

    def step(self) -> list[Event]:
        choice = self.rng.random()
        if choice < 0.55:
            return self.store()
        if choice < 0.7:
            return self.offload()
        return self.clear() if choice > 0.98 else self.remove()

    def prompt(self) -> tuple[dict[str, Any], list[int], list[int], list[int]]:
        """Namespace, tokens, block hashes and sequence hashes of a prompt."""
        space = self.rng.choice(SPACES)
        num_pages = self.rng.randint(1, 6)
        stem, leaf = self.rng.randrange(3), self.rng.randrange(3)
        fork = self.rng.randrange(num_pages + 1) * self.block_size
        tokens = [stem * 100 + i for i in range(num_pages * self.block_size + self.is_bigram)]
        tokens[fork:] = [token + 1000 * (leaf + 1) for token in tokens[fork:]]
        names = names_of(
            tokens, self.block_size, lora=space.get("lora_name"), salt=space.get("cache_salt"), is_bigram=self.is_bigram
        )
        hashes = [(name * 0x9E3779B97F4A7C15) & MASK64 for name in names]
        return space, tokens, hashes, names

    def store(self) -> list[Event]:
        space, tokens, hashes, names = self.prompt()
        first = self.rng.randrange(len(hashes))
        known = {h for _, h in self.held} if self.builds_on_held else self.known
        while first > 0 and hashes[first - 1] not in known:
            first -= 1
        tier = self.rng.choice([GPU, GPU, GPU, CPU])
        cuts = sorted({first, len(hashes), *(self.rng.randrange(first, len(hashes) + 1) for _ in range(2))})
        events = []
        for start, stop in itertools.pairwise(cuts):
            part = tokens[start * self.block_size : stop * self.block_size + self.is_bigram]
            fields = self.fields_of(space, start, stop - start)
            parent = self.hash(hashes[start - 1]) if start else None
            written = pairs(part) if self.is_bigram else part
            events.append(
                stored(
                    self.hashes(hashes[start:stop]),
                    written,
                    self.block_size,
                    parent,
                    medium=self.medium(tier),
                    **fields,
                )
            )
            self.held.update(((tier, h), name) for h, name in zip(hashes[start:stop], names[start:stop], strict=True))
            self.copies.update((tier, h) for h in hashes[start:stop] if tier == GPU)
            self.known.update(hashes[start:stop])
        return events

    def fields_of(self, space: dict[str, Any], start: int, num_pages: int) -> dict[str, Any]:
        if not self.is_vllm:
            return dict(space)
        lora, salt = space.get("lora_name"), space.get("cache_salt")
        entries: list[Any] = [
            ([lora] if lora else []) + ([salt] if salt and start + i == 0 else []) or None for i in range(num_pages)
        ]
        return {
            **({"lora_name": lora} if lora else {}),
            **({"extra_keys": entries} if any(entries) or self.rng.random() < 0.5 else {}),
        }

    def offload(self) -> list[Event]:
        """Store known pages on another medium, without their tokens."""
        on_gpu = sorted({(h, name) for (_, h), name in self.held.items()})
        if not on_gpu or not self.is_vllm:
            return []
        chosen = self.rng.sample(on_gpu, min(len(on_gpu), 3))
        tier = self.rng.choice([CPU, DISK])
        self.held.update(((tier, h), name) for h, name in chosen)
        return [stored(self.hashes([h for h, _ in chosen]), [], 0, medium=self.medium(tier))]

    def remove(self) -> list[Event]:
        if not self.held:
            return [removed([self.rng.getrandbits(64)], "GPU")]
        tier = self.rng.choice(sorted({tier for tier, _ in self.held}))
        here = sorted(h for t, h in self.held if t == tier)
        gone = self.rng.sample(here, min(len(here), self.rng.randint(1, 4)))
        for h in gone:
            self.copies[tier, h] -= 1
            if self.copies[tier, h] <= 0:
                del self.held[tier, h], self.copies[tier, h]
        return [removed(self.hashes(gone), self.medium(tier))]

    def clear(self) -> list[Event]:
        self.held.clear()
        self.copies.clear()
        return [cleared()]

    def medium(self, tier: int) -> str | None:
        return self.rng.choice(MEDIA[tier])

    def hashes(self, values: list[int]) -> list[Any]:
        return [self.hash(value) for value in values]

    def hash(self, value: int) -> Any:
        """Return a hash in one of its encodings."""
        spelling = self.rng.randrange(4)
        if spelling == 0 and value >= 2**63:
            return value - 2**64
        return (self.rng.randbytes(24) + value.to_bytes(8, "big")) if spelling == 1 else value


def publish_random(engine: FakeEngine, rig: Rig, num_batches: int = 25) -> None:
    """Send an engine's batches to a bridge and compare after each of them."""
    rng = engine.rng
    for _ in range(num_batches):
        events = [event for _ in range(rng.randrange(4)) for event in engine.step()]
        # the array format has no field for salts of adapters
        forms: list[Any] = (
            ["map"] if any("cache_salt" in event for event in events) else ["array", "array with nils", "map"]
        )
        rig.take(*events, form=rng.choice(forms), batch=rng.choice(["array", "map", "pair"]))
        assert rig.pages == engine.pages
    assert rig.counters.bad_events == {}
    assert rig.counters.unknown_parents == rig.counters.unresolved_pages == 0


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 16, 64]), st.booleans(), st.booleans())
def test_the_stream_states_what_the_engine_holds(seed: int, block_size: int, is_bigram: bool, is_vllm: bool) -> None:
    rng = random.Random(seed)
    publish_random(FakeEngine(rng, block_size, is_bigram=is_bigram, is_vllm=is_vllm, builds_on_held=False), Rig())


@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.integers(0, 10))
def test_with_hardly_any_hashes_of_removed_pages_it_still_does_where_engines_build_on_what_they_hold(
    seed: int, is_bigram: bool, is_vllm: bool, name_pages: int
) -> None:
    rng = random.Random(seed)
    rig = Rig(name_pages=name_pages)
    publish_random(FakeEngine(rng, 2, is_bigram=is_bigram, is_vllm=is_vllm, builds_on_held=True), rig, 40)
    rig.take(cleared())
    rig.take(stored([1], [1, 2], 2))
    rig.take(stored([2], [3, 4], 2))
    assert rig.translator.num_remembered <= name_pages + 2
