"""Records vLLM's own block managers without a model: `python -m tests.engines.scheduler FOLDER` with vLLM's Python.

What `get_computed_blocks` answers is the truth. Every lookup comes after the events of all that happened before it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec
import torch
import vllm
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.engines.prompts import Prompts
from tests.engines.recording import Asked, Batch, Header, Registration, Step, write
from tests.engines.slow_reader import SlowReader

MAX_TOKENS = 800
_CHUNK = 256
_MAX_RUNNING = 4


class Group(NamedTuple):
    """An attention group in words: kind, tokens of a block, and tokens of its window or chunk."""

    kind: str
    block_size: int
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens} / {self.block_size}" if self.tokens else f"{self.kind} {self.block_size}"

    @property
    def spec(self) -> Any:
        shape = {"block_size": self.block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        match self.kind:
            case "full":
                return kv.FullAttentionSpec(**shape)
            case "window":
                return kv.SlidingWindowSpec(**shape, sliding_window=self.tokens)
            case "chunked":
                return kv.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.tokens)
        mode = "align" if self.kind == "mamba" else "all"
        return kv.MambaSpec(self.block_size, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode=mode)


class Scenario(NamedTuple):
    groups: list[Group]
    num_blocks: int
    registration: Registration = Registration()
    report_mode: str = "incremental"
    retention_interval: int | None = None
    """0: windows and states are kept only where prompts end."""


FULL, MAMBA = Group("full", 32), Group("mamba", 32)
EAGLE = Registration(eagle=True)
SCENARIOS = {
    "copies": Scenario([FULL], 140),
    "two-full-groups": Scenario([FULL, FULL], 280),
    "repeated-stores": Scenario([FULL], 140, Registration(count_copies=False), "full"),
    "several-windows": Scenario([Group("window", 32, 96), Group("window", 32, 300), FULL], 410),
    "small-windowed-blocks": Scenario([Group("window", 32, 40), Group("full", 128)], 240),
    "large-windowed-blocks": Scenario([Group("window", 64, 200), FULL], 240),
    "large-mamba-blocks": Scenario([Group("mamba", 64), FULL], 200),
    "windows-and-mamba": Scenario([Group("window", 32, 128), MAMBA, FULL], 350),
    "kept-where-prompts-end": Scenario([Group("window", 32, 128), MAMBA, FULL], 350, retention_interval=0),
    "only-windows": Scenario([Group("window", 32, 100)], 140),
    "two-windows-alone": Scenario([Group("window", 32, 64), Group("window", 32, 256)], 250),
    "only-mamba": Scenario([Group("mamba", 32)], 60),
    "mamba-at-every-block": Scenario([Group("mamba at every block", 32), FULL], 320),
    "chunks": Scenario([Group("chunked", 32, 256), FULL], 250, Registration(attention_chunk_size=256)),
    "eagle": Scenario([FULL], 140, EAGLE),
    "eagle-windows": Scenario([Group("window", 32, 128), FULL], 250, EAGLE),
    "eagle-mamba": Scenario([MAMBA, FULL], 200, EAGLE),
}


class Engine:
    """The part of vLLM's scheduler that allocates blocks, for several requests at once. Computes nothing."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        sizes = [group.block_size for group in scenario.groups]
        self.block_size, self.unit = math.lcm(*sizes), math.gcd(*sizes)
        self.rng = random.Random(seed)
        self.prompts = Prompts(self.rng, MAX_TOKENS)
        self.steps: list[Step] = []
        self.reader = SlowReader(scenario.registration)
        self.wrong: list[tuple[int, int]] = []
        """(reused, predicted by the slow reader)"""
        groups = [kv.KVCacheGroupSpec([f"layer {n}"], group.spec) for n, group in enumerate(scenario.groups)]
        self._is_aligned = any(group.kind == "mamba" for group in scenario.groups)
        self._eagle = scenario.registration.eagle
        self._report_mode = scenario.report_mode
        self._hasher = get_request_block_hasher(self.unit, sha256)
        self._manager = KVCacheManager(
            kv.KVCacheConfig(scenario.num_blocks, [], groups, scenario.retention_interval),
            MAX_TOKENS + 64,
            self.block_size,
            self.unit,
            max_in_flight_tokens=_CHUNK,
            use_eagle=self._eagle,
            enable_kv_cache_events=True,
        )
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._num_requests = self._num_batches = 0

    def step(self) -> None:
        """Schedule once, as far as blocks and tokens allow."""
        self._manager.new_step_starts()
        for request in list(self._running):
            if request in self._running and not self._advance(request, None):
                self._preempt(self._running[-1])
        self._admit()
        self._publish()
        _, copied = self._manager.take_kv_cache_block_copies()
        self._manager.block_pool.free_blocks(copied)
        for request in list(self._running):
            if request.num_computed_tokens >= request.num_tokens:
                if len(request.output_token_ids) >= request.max_tokens:
                    self._running.remove(request)
                    self._manager.free(request)
                else:
                    request.append_output_token_ids(self.rng.randrange(3, 1000))
        self._publish()

    def send(self) -> None:
        """Let one to four requests of a prompt wait, unless many do; ask for others without computing them."""
        if len(self._waiting) > 2:
            return
        prompt = self.prompts.draw()
        if self._report_mode == "full":  # no copies: readers that ignore repeated stores cannot count them
            if not self._running and len(prompt) % self.block_size:
                self._waiting.append(self._request(prompt, 1))
            return
        for _ in range(self.rng.choice([1, 1, 1, 2, 4])):
            self._waiting.append(self._request(prompt, self.rng.choice([1, 2, 20])))
        for _ in range(2):
            self._ask(self._request(self.prompts.draw(), 1))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < _MAX_RUNNING:
            request = self._waiting[0]
            found = self._ask(request)
            if not self._advance(request, found):
                return
            self._running.append(self._waiting.pop(0))

    def _ask(self, request: Request) -> Any:
        self._publish()
        blocks, reused, request.shared_prefix_boundary = self._manager.get_computed_blocks(request)
        prompt = list(request.all_token_ids)
        self.steps.append(Asked(0, prompt, "", reused))
        predicted = self.reader.reused(self.reader.names_of(prompt, ""), len(prompt))
        if predicted != reused:
            self.wrong.append((reused, predicted))
        return blocks, reused

    def _advance(self, request: Request, found: Any) -> bool:
        """Allocate and "compute" the next tokens. False if there are no blocks."""
        blocks, reused = found or (None, 0)
        start = request.num_computed_tokens + reused
        count = min(request.num_tokens - start, _CHUNK)
        if self._is_aligned:
            count = self._aligned(request, start, count)
        if self._manager.allocate_slots(request, count, reused, blocks) is None:
            return False
        request.num_computed_tokens = start + count
        return True

    def _aligned(self, request: Request, start: int, count: int) -> int:
        """`Scheduler._mamba_block_aligned_split`: states are kept at the ends of chunks."""
        if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return count
        end, fine = start + count, self.unit < self.block_size

        def last(size: int) -> int:
            return int(kv.get_mamba_prefill_checkpoint_position(request.num_tokens, size, self._eagle))

        if end < request.num_tokens:
            end = end // self.block_size * self.block_size
        stops = [last(self.block_size), last(self.unit) if fine else 0]
        if start % self.block_size:
            stops.append((start // self.block_size + 1) * self.block_size)
        if start < request.shared_prefix_boundary < end:
            stops.append(start + (request.shared_prefix_boundary - start) // self.block_size * self.block_size)
        return min((stop for stop in stops if start < stop < end), default=end) - start

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._manager.free(request)
        request.num_computed_tokens = 0
        self._waiting.insert(0, request)

    def _publish(self) -> None:
        events = self._manager.take_events()
        if events:
            payload = msgspec.msgpack.encode(KVEventBatch(0.0, events, 0))
            self.steps.append(Batch(0, self._num_batches, payload))
            self.reader.apply(payload)
            self._num_batches += 1

    def _request(self, prompt: list[int], max_tokens: int) -> Request:
        self._num_requests += 1
        parameters = SamplingParams(max_tokens=max_tokens, extra_args={"kv_cache_report_mode": self._report_mode})
        return Request(str(self._num_requests), prompt, parameters, None, block_hasher=self._hasher)


def played(engine: Engine, num_requests: int) -> Iterator[int]:
    """Play so many lookups; yield how many there were."""
    count = 0
    while count < num_requests:
        engine.send()
        engine.step()
        count = sum(isinstance(step, Asked) for step in engine.steps)
        yield count


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.scheduler", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=3000, help="lookups that the slow reader must predict")
    parser.add_argument("--recorded", type=int, default=200, help="lookups that are kept")
    parser.add_argument("--seed", type=int, default=2, help="default: one whose first requests meet lost copies")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    init_none_hash(sha256)
    num_wrong = 0
    for name, scenario in SCENARIOS.items():
        if arguments.names and name not in arguments.names:
            continue
        engine, kept = Engine(scenario, arguments.seed), 0
        for count in played(engine, arguments.requests):
            if count <= arguments.recorded:
                kept = len(engine.steps)
        header = Header(
            engine="vllm",
            version=vllm.__version__,
            model=", ".join(map(str, scenario.groups)),
            block_size=engine.unit,
            registration=scenario.registration,
        )
        size = write(arguments.folder / f"scheduler-{name}.rec", header, engine.steps[:kept])
        asked = [step for step in engine.steps if isinstance(step, Asked)]
        depth = Counter(min(4, step.reused * 5 // len(step.prompt)) for step in asked)
        shares = " ".join(f"{depth[fifth] / len(asked):4.0%}" for fifth in range(5))
        print(f"{name:24} {len(asked)} asked, {len(engine.wrong)} wrong, {size:7,} bytes; reused in fifths: {shares}")
        for reused, predicted in engine.wrong[:3]:
            print(f"    reused {reused}, the slow reader says {predicted}")
        num_wrong += len(engine.wrong)
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
