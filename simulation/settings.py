"""Settings of a simulation, and of its engines."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError
from kv_events.kafka.settings import KafkaSettings
from kv_events.limits import MAX_BLOCK_SIZE
from kv_events.streams import MAMBA_GROUP

MAX_WORKERS = 4096
MAX_RATIO = 1000
MAX_ROUTERS = 64
CACHES = ("radix", "hiradix", "mamba", "himamba")
"""Kinds of caches: device only, or with host and disk (`hi`); without or with recurrent states (`mamba`)."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits and speed of an engine. Raises InvalidValueError naming the field of a bad value.

    The speed is that of the mock engine of NVIDIA Dynamo 1.6.1: 16.5 + 0.01518 t + 4.21e-7 t**2 milliseconds for t
    prompt tokens, and 5.74 + 54.01 p for a step of decode while a share p of 2**20 tokens of KV is in use. A model
    with 8 billion parameters needs about as long on an H100.
    """

    max_batch_tokens: int = 8192
    """Most tokens of a step."""
    max_requests: int = 256
    """Most requests that run at the same time."""
    prefill_s: float = 0.0165
    """Seconds of a step that computes prompt tokens, whatever their number."""
    decode_s: float = 0.00574
    """Seconds of a step that generates tokens, whatever their number."""
    token_s: float = 1.518e-5
    """Seconds for each token of a step."""
    attention_s: float = 8.42e-10
    """Seconds for each prompt token of a step and each token before it."""
    context_s: float = 5.15e-8
    """Seconds for each token in the context of a request in decode."""

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if name.startswith("max_") and value < 1:
                raise InvalidValueError(name, value, "a positive integer")
            if not 0 <= value < math.inf:
                raise InvalidValueError(name, value, "a number, not negative")

    def prefill_seconds(self, chunks: list[tuple[int, int]]) -> float:
        """Return the time of the prompt tokens of a step. chunks: (tokens before, tokens), at least one."""
        pairs = sum(tokens * (before + tokens / 2) for before, tokens in chunks)
        return self.prefill_s + self.token_s * sum(tokens for _, tokens in chunks) + self.attention_s * pairs

    def decode_seconds(self, num_requests: int, context: int, num_steps: int) -> Seconds:
        """Return float64[num_steps], the times of consecutive steps of decode. context: tokens, of all requests."""
        contexts: Seconds = context + num_requests * np.arange(num_steps, dtype=np.float64)
        return self.decode_s + self.token_s * num_requests + self.context_s * contexts

    def alone_seconds(self, prompt_tokens: int, found_tokens: int, output_tokens: int) -> tuple[float, float]:
        """Return the times to the first token and to the last one if nothing else runs."""
        first_s = self.prefill_seconds([(found_tokens, prompt_tokens - found_tokens)])
        return first_s, first_s + float(self.decode_seconds(1, prompt_tokens, output_tokens - 1).sum())


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Raises InvalidValueError naming the field of a bad value."""

    workers: int = 8
    capacity_tokens: int = 2**20
    """Tokens that a worker's cache holds on the device; a multiple of the page size."""
    page_size: int = 64
    """Tokens a page."""
    cache: str = "radix"
    """One of `CACHES`."""
    host_ratio: float = 2.0
    """Tokens on the host for each token on the device, in caches with tiers. At least 1."""
    disk_ratio: float = 8.0
    """Tokens on the disk for each token on the device."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """Limits and speed of an engine."""
    speed: float = 1.0
    """Factor by which requests arrive faster than in the workload."""
    routers: int = 1
    """Replicas of the router, which get the requests in turns."""
    booking_delay_s: float = 0.02
    """Seconds until a router knows what another one has booked; `math.inf`: never. All know what the workers hold."""
    ttft_slo_s: float = 2.0
    """Longest time to the first token of a request that counts for the goodput."""
    itl_slo_s: float = 0.05
    """Longest mean time between its tokens."""
    seed: int = 0
    """Seed of random choices."""
    model: str = "simulation"
    """The fleet of each policy serves the model `<model>-<policy>`, so that several fleets can share a log."""
    event_log_dir: Path | None = None
    """Record every policy's run as an event log in `<event_log_dir>/<policy>`."""
    groups: bool = False
    """Whether workers with recurrent states publish them in group streams (see `kv_events.streams`)."""
    kafka: KafkaSettings | None = None
    """A broker and topics for the events. None: events are applied directly, which is deterministic."""

    def __post_init__(self) -> None:
        is_multiple = self.capacity_tokens >= self.page_size and not self.capacity_tokens % max(1, self.page_size)
        checks = {
            "workers": (1 <= self.workers <= MAX_WORKERS, f"1 .. {MAX_WORKERS}"),
            "page_size": (1 <= self.page_size <= MAX_BLOCK_SIZE, f"1 .. {MAX_BLOCK_SIZE}"),
            "capacity_tokens": (is_multiple, f"a positive multiple of the page size {self.page_size}"),
            "cache": (self.cache in CACHES, f"one of {', '.join(CACHES)}"),
            "host_ratio": (1 <= self.host_ratio <= MAX_RATIO, f"1 .. {MAX_RATIO}"),
            "disk_ratio": (0 < self.disk_ratio <= MAX_RATIO, f"more than 0, at most {MAX_RATIO}"),
            "routers": (1 <= self.routers <= MAX_ROUTERS, f"1 .. {MAX_ROUTERS}"),
            "booking_delay_s": (self.booking_delay_s >= 0, "a number, not negative, or inf"),
            "speed": (0 < self.speed < math.inf, "more than 0"),
            "ttft_slo_s": (0 < self.ttft_slo_s < math.inf, "more than 0"),
            "itl_slo_s": (0 < self.itl_slo_s < math.inf, "more than 0"),
            "groups": (self.has_states or not self.groups, f"a cache with states (mamba, himamba), got {self.cache}"),
        }
        for name, (is_valid, expected) in checks.items():
            if not is_valid:
                raise InvalidValueError(name, getattr(self, name), expected)
        if self.kafka is not None and self.event_log_dir is not None:
            raise InvalidValueError(
                "event_log_dir", str(self.event_log_dir), "none with kafka: the topic is the recording"
            )

    @property
    def has_tiers(self) -> bool:
        """Whether the cache has a host tier and a disk."""
        return self.cache in ("hiradix", "himamba")

    @property
    def has_states(self) -> bool:
        """Whether the cache has recurrent states."""
        return self.cache in ("mamba", "himamba")

    @property
    def event_groups(self) -> tuple[str, ...]:
        """Groups for which every worker publishes a stream."""
        return (MAMBA_GROUP,) if self.groups else ()

    def model_of(self, policy: str) -> str:
        """Return the model name of a policy's fleet."""
        return f"{self.model}-{policy}"
