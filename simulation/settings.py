"""What one simulation is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kv_events.errors import InvalidValueError
from kv_events.limits import MAX_BLOCK_SIZE
from kv_events.streams import CONTROL_TOPIC, EVENTS_TOPIC, MAMBA_GROUP

MAX_WORKERS = 4096
MAX_RATIO = 1000
CACHES = ("radix", "hiradix", "mamba", "himamba")
"""Kinds of caches: on the device alone or with host and disk (`hi`), without and with recurrent states (`mamba`)."""
_HYBRID = ("mamba", "himamba")


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Raises InvalidValueError naming the field of a bad value."""

    workers: int = 8
    capacity_tokens: int = 2**20
    """Tokens that a worker's cache holds on the device: a whole number of pages."""
    page_size: int = 64
    """Tokens a page."""
    cache: str = "radix"
    """One of `CACHES`."""
    host_ratio: float = 2.0
    """Tokens on the host for each on the device, in caches with tiers. The host must be the larger of the two."""
    disk_ratio: float = 8.0
    """The same for the disk."""
    seed: int = 0
    """Of the policies that draw."""
    model: str = "simulation"
    """Each policy's fleet serves the model `<model>-<policy>`, so that fleets on one log are kept apart."""
    event_log_dir: Path | None = None
    """Record every policy's run as an event log in `<event_log_dir>/<policy>`."""
    groups: bool = False
    """Workers with recurrent states say where these are, in group streams (see `kv_events.streams`)."""
    kafka: str | None = None
    """Bootstrap servers: events go through this broker. None: straight into the index, which is deterministic."""
    events_topic: str = EVENTS_TOPIC
    control_topic: str = CONTROL_TOPIC
    """Topics of that broker."""

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
        if self.groups and self.cache not in _HYBRID:
            raise InvalidValueError("groups", True, f"a cache with states ({', '.join(_HYBRID)}), got {self.cache}")
        if self.kafka is not None and self.event_log_dir is not None:
            raise InvalidValueError(
                "event_log_dir", str(self.event_log_dir), "none with kafka: the topic is the recording"
            )

    @property
    def has_tiers(self) -> bool:
        """Whether there are host and disk below the device."""
        return self.cache in ("hiradix", "himamba")

    @property
    def event_groups(self) -> tuple[str, ...]:
        """Groups of which every worker publishes a stream."""
        return (MAMBA_GROUP,) if self.groups else ()

    def model_of(self, policy: str) -> str:
        """Model name of a policy's fleet."""
        return f"{self.model}-{policy}"
