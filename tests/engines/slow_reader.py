"""A slow reader of vLLM's events, to tell a wrong index from a wrong comparison: it predicts what the engine reuses.

A dictionary of counts and the rule of `HybridKVCacheCoordinator`; nothing is shared with the bridge or the index.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tests.engines.recording import Registration


class Spec(NamedTuple):
    """A specification. Groups of one specification hold a block only if all of them do."""

    kind: str
    block_size: int
    window: int | None

    @property
    def is_full(self) -> bool:
        return self.kind in ("full_attention", "mla_attention", "sink_full_attention")


class SlowReader:
    """Counts the copies of each block in each group."""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        self._copies: Counter[tuple[int, int]] = Counter()  # (group, hash)
        self._groups: dict[int, Spec] = {}
        self._names: dict[
            tuple[str, tuple[int, ...]], int
        ] = {}  # salt and tokens of a prefix -> name of its last block
        self._prefixes: dict[int | None, tuple[str, tuple[int, ...]]] = {}  # the reverse

    def apply(self, payload: bytes) -> None:
        """Apply one batch."""
        events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
        stores = [event for event in events if event["type"] == "BlockStored"]
        for event in sorted(stores, key=lambda each: len(each["block_hashes"]) * each["block_size"], reverse=True):
            self._learn(event)  # those of all their tokens first
        for event in events:
            group, names = event.get("group_idx", 0), event.get("block_hashes", [])
            if event["type"] == "BlockStored":
                self._copies.update((group, name) for name in names)
                if not self._registration.count_copies:
                    self._copies.update({(group, name): 1 - self._copies[group, name] for name in names})
            elif event["type"] == "BlockRemoved":
                self._copies.subtract((group, name) for name in names)
                assert all(self._copies[group, name] >= 0 for name in names), "a removal without a store"
            else:
                self._copies.clear()

    def names_of(self, prompt: Sequence[int], salt: str) -> list[int]:
        """Return the engine's names of a prompt's blocks; 0 for those that no store named."""
        names = (self._names.get((salt, tuple(prompt[:end]))) for end in range(self._unit, len(prompt) + 1, self._unit))
        return [0 if name is None else name for name in names]

    def reused(self, names: Sequence[int], num_tokens: int) -> int:
        """Return how many of a prompt's tokens the engine reuses. names: of its blocks of the smallest size."""
        specs: dict[Spec, list[int]] = defaultdict(list)
        for group, spec in self._groups.items():
            specs[spec].append(group)
        if not specs:
            return 0
        hit, previous = num_tokens - 1, -1
        if len(self._groups) == 1:
            [spec] = specs
            return self._hit(spec, [0], names, hit, spec.block_size, drops=self._registration.eagle)
        ordered = sorted(specs, key=lambda spec: not spec.is_full)
        is_fine = all(s.is_full or s.kind == "mamba" or s.block_size == self._unit for s in specs) and any(
            s.kind == "mamba" and s.block_size > self._unit for s in specs
        )
        align = self._unit if is_fine else math.lcm(*(spec.block_size for spec in specs))
        dropped: set[Spec] = set()
        while hit != previous:
            previous = hit
            for spec in ordered:
                drops = self._registration.eagle and spec not in dropped
                extra = min(spec.block_size, align) if drops and spec.kind != "mamba" else 0
                found = self._hit(spec, specs[spec], names, hit + extra, align, drops=drops)
                if drops:
                    dropped.add(spec)
                elif found < hit:
                    dropped.clear()
                hit = min(hit, found) if spec.is_full else found
            if len(ordered) == 2 and ordered[0].is_full:
                break
        return hit

    @property
    def _unit(self) -> int:
        return math.gcd(*(spec.block_size for spec in self._groups.values())) or 1

    def _learn(self, event: dict[str, Any]) -> None:
        """Name the blocks of a store. Where some are left out, the others end at its end, or at a known block."""
        group, size, tokens = event.get("group_idx", 0), event["block_size"], event["token_ids"]
        if group not in self._groups:
            kind = event.get("kv_cache_spec_kind", "full_attention")
            self._groups[group] = Spec(kind, size, event.get("kv_cache_spec_sliding_window"))
        first = (event.get("extra_keys") or [None])[0] or [event.get("cache_salt") or ""]  # vLLM's way, and SGLang's
        salt, before = self._prefixes.get(event["parent_block_hash"], (first[-1], ()))
        if event["parent_block_hash"] is not None and not before:
            return  # children of blocks without a name
        end = len(before) + len(tokens)
        for name in reversed(event["block_hashes"]):
            end = len(self._prefixes[name][1]) if name in self._prefixes else end
            key = salt, (*before, *tokens)[:end]
            self._names[key], self._prefixes[name] = name, key
            end -= size

    def _hit(
        self, spec: Spec, groups: Sequence[int], names: Sequence[int], limit: int, align: int, *, drops: bool
    ) -> int:
        """Return the longest hit of at most `limit` tokens in groups of one specification."""
        size = spec.block_size

        def holds(end: int) -> bool:
            place = end // self._unit - 1
            return place < len(names) and all(self._copies[group, names[place]] > 0 for group in groups)

        last = limit // size * size
        if spec.kind == "mamba":
            step = min(size, align)
            return next((e for e in range(limit // step * step, 0, -step) if e % align == 0 and holds(e)), 0)
        if spec.window is not None and not spec.is_full:
            need = math.ceil((spec.window - 1) / size) + drops
            for end in range(last, 0, -size):
                after = end - drops * size
                if after % align == 0 and all(holds(e) for e in range(end, max(0, end - need * size), -size)):
                    return after
            return 0
        chunk = self._registration.attention_chunk_size
        hit = limit // chunk * chunk // size * size if spec.kind == "chunked_local_attention" and chunk else 0
        while hit < last and holds(hit + size):
            hit += size
        hit -= min(align, size) if drops and hit else 0
        return hit // align * align
