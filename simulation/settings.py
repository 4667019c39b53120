"""Settings of a simulation."""

from dataclasses import dataclass
from pathlib import Path

from kv_events.errors import InvalidValueError
from kv_events.kafka.settings import KafkaSettings
from kv_events.limits import MAX_BLOCK_SIZE
from kv_events.streams import MAMBA_GROUP

MAX_WORKERS = 4096
MAX_RATIO = 1000
CACHES = ("radix", "hiradix", "mamba", "himamba")
"""Kinds of caches: device only, or with host and disk (`hi`); without or with recurrent states (`mamba`)."""


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
    seed: int = 0
    """Seed of the random policy."""
    model: str = "simulation"
    """The fleet of each policy serves the model `<model>-<policy>`, so that several fleets can share a log."""
    event_log_dir: Path | None = None
    """Record every policy's run as an event log in `<event_log_dir>/<policy>`."""
    groups: bool = False
    """Whether workers with recurrent states publish them in group streams (see `kv_events.streams`)."""
    kafka: KafkaSettings | None = None
    """A broker and topics for the events. None: events are applied directly, which is deterministic."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise InvalidValueError("workers", self.workers, f"1 .. {MAX_WORKERS}")
        if not 1 <= self.page_size <= MAX_BLOCK_SIZE:
            raise InvalidValueError("page_size", self.page_size, f"1 .. {MAX_BLOCK_SIZE}")
        if self.capacity_tokens < self.page_size or self.capacity_tokens % self.page_size:
            expected = f"a positive multiple of the page size {self.page_size}"
            raise InvalidValueError("capacity_tokens", self.capacity_tokens, expected)
        if self.cache not in CACHES:
            raise InvalidValueError("cache", self.cache, f"one of {', '.join(CACHES)}")
        if not 1 <= self.host_ratio <= MAX_RATIO:
            raise InvalidValueError("host_ratio", self.host_ratio, f"1 .. {MAX_RATIO}")
        if not 0 < self.disk_ratio <= MAX_RATIO:
            raise InvalidValueError("disk_ratio", self.disk_ratio, f"more than 0, at most {MAX_RATIO}")
        if self.groups and not self.has_states:
            raise InvalidValueError("groups", True, f"a cache with states (mamba, himamba), got {self.cache}")
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
