"""Settings of a publisher: read once, from arguments or `KVSIGHT_*` variables, frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from kv_events.errors import InvalidValueError
from kv_events.limits import MAX_BLOCK_SIZE, MAX_DP_RANK, MAX_NAME_BYTES, MAX_PAGES_PER_BATCH, MAX_RECORD_BYTES
from kv_events.settings import KafkaSettings, variable
from kv_events.streams import DEFAULT_TENANT, StreamId

_RECORD_OVERHEAD_BYTES = 4096
"""Room that a record needs besides its pages: names, digest, framing."""


class PublisherSettings(KafkaSettings):
    """What one `EventPublisher` needs to know. Raises InvalidValueError naming the variable of a bad value."""

    model: str = Field(min_length=1, max_length=MAX_NAME_BYTES)
    worker: str = Field(min_length=1, max_length=MAX_NAME_BYTES)
    tenant: str = Field(default=DEFAULT_TENANT, min_length=1, max_length=MAX_NAME_BYTES)
    dp_rank: int = Field(default=0, ge=0, le=MAX_DP_RANK)
    block_size: int = Field(ge=1, le=MAX_BLOCK_SIZE)
    """Tokens a page."""

    log_folder: Path | None = None
    """Folder of an event log to write; None: none."""
    topic_partitions: int = Field(default=8, ge=1)
    """Partitions of the events topic, should it have to be made."""
    topic_replication: int = Field(default=1, ge=1)
    compression: Literal["none", "lz4", "zstd"] = "none"

    zmq: str | None = None
    """Address to publish on in the engines' own protocol, `tcp://*:5557`; rank r counts the port up by r. None: none.
    """
    zmq_replay: str | None = None
    """Address of the replay socket, with ranks as above; None: none."""
    zmq_encoding: Literal["array", "map"] = "array"
    """Form of events: arrays, which every reader knows, or maps, as vLLM's and SGLang's newer versions write."""
    zmq_replay_layout: Literal["new", "old"] = "new"
    """Frames of a replayed batch: topic, number, batch; or without the topic."""
    zmq_topic: str = Field(default="", max_length=MAX_NAME_BYTES)
    zmq_buffer_steps: int = Field(default=10_000, ge=1, le=10_000_000)
    """Batches kept for replay."""
    zmq_hwm: int = Field(default=100_000, ge=1, le=2**31 - 1)
    """Batches that may wait for a slow reader; it misses what goes beyond, and has it replayed."""

    with_tokens: bool = False
    """Send token ids and extra keys along, at the price of privacy and bytes: for `zmq`, and for debugging."""
    ledger_pages: int = Field(default=4_000_000, ge=1, le=2**30)
    """Largest number of pages the worker may hold; what goes beyond is not published."""
    queue_pages: int = Field(default=1_000_000, ge=1, le=2**30)
    """Bound on page changes that wait or are in flight."""
    batch_pages: int = Field(default=8192, ge=1, le=MAX_PAGES_PER_BATCH)
    batch_bytes: int = Field(default=262_144, ge=1024, le=MAX_RECORD_BYTES - _RECORD_OVERHEAD_BYTES)
    linger_ms: float = Field(default=5.0, ge=0)
    """How long a batch may wait for company."""
    inflight_batches: int = Field(default=32, ge=1)
    """Most records handed to the sink at once."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    resync_min_interval_s: float = Field(default=1.0, ge=0)
    resync_jitter_s: float = Field(default=0.5, ge=0)
    """A resync that was asked for waits a random time up to this, so that workers do not answer all at once."""

    @model_validator(mode="after")
    def _names_fit_the_wire(self) -> Self:
        for field in ("model", "worker", "tenant"):
            name: str = getattr(self, field)
            try:
                num_bytes = len(name.encode())
            except UnicodeEncodeError:
                raise InvalidValueError(variable(field), name, "text that UTF-8 can hold") from None
            if num_bytes > MAX_NAME_BYTES:
                raise InvalidValueError(variable(field), name, f"at most {MAX_NAME_BYTES} bytes of UTF-8")
        return self

    @model_validator(mode="after")
    def _tokens_fit_a_batch(self) -> Self:
        needed = 4 * (self.block_size + 1) + 2048
        if self.with_tokens and self.batch_bytes < needed:
            expected = f"at least {needed}: one page of {self.block_size} tokens"
            raise InvalidValueError(variable("batch_bytes"), self.batch_bytes, expected)
        return self

    @property
    def stream(self) -> StreamId:
        """Name of the publisher's stream."""
        return StreamId(self.model, self.tenant, self.worker, self.dp_rank)
