"""Settings of a publisher, from arguments or `KVSIGHT_*` variables."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from kv_events.errors import InvalidValueError
from kv_events.kafka.settings import KafkaSettings
from kv_events.limits import MAX_BLOCK_SIZE, MAX_DP_RANK, MAX_NAME_BYTES, MAX_PAGES_PER_BATCH, MAX_RECORD_BYTES
from kv_events.runtime.variables import variable
from kv_events.streams import DEFAULT_TENANT, HEARTBEAT_S, StreamId

_RECORD_OVERHEAD_BYTES = 4096
"""Room that a record needs besides its pages: names, digest, framing."""


class PublisherSettings(KafkaSettings):
    """Settings of one `EventPublisher`. Frozen. Raises InvalidValueError naming the variable of a bad value."""

    model: str = Field(min_length=1, max_length=MAX_NAME_BYTES)
    worker: str = Field(min_length=1, max_length=MAX_NAME_BYTES)
    tenant: str = Field(default=DEFAULT_TENANT, min_length=1, max_length=MAX_NAME_BYTES)
    dp_rank: int = Field(default=0, ge=0, le=MAX_DP_RANK)
    block_size: int = Field(ge=1, le=MAX_BLOCK_SIZE)
    """Tokens per page."""

    event_log_dir: Path | None = None
    """Folder of an event log to write. None: no event log."""
    compression: Literal["none", "lz4", "zstd"] = "none"
    """Compression of records. Packed hashes hardly compress; tokens do."""

    zmq: str | None = None
    """Address to publish on in the engines' own protocol, such as `tcp://*:5557`. Rank r adds r to the port. None: no
    ZMQ."""
    zmq_replay: str | None = None
    """Address of the replay socket, with ranks as above. None: no replay."""
    zmq_topic: str = Field(default="", max_length=MAX_NAME_BYTES)
    """Topic of every message."""
    zmq_encoding: Literal["array", "map"] = Field("array")
    """Form of events: arrays, which every reader understands, or maps, as newer versions of vLLM and SGLang write."""
    zmq_replay_layout: Literal["new", "old"] = Field("new")
    """Frames of a replayed batch: topic, number and batch; "old" leaves out the topic."""

    metrics_port: int | None = Field(default=None, ge=1, le=65_535)
    """Port on which `kvsight demo --engine` and the engine plug-in serve Prometheus metrics. None: no metrics. In the
    plug-in, rank r adds r to it."""

    with_tokens: bool = False
    """Send token ids and extra keys, too. Required by `zmq`, useful for debugging; costs privacy and bytes."""
    ledger_pages: int = Field(default=4_000_000, ge=1, le=2**30)
    """Bound on the pages that the worker may hold. Pages beyond it are not published."""

    queue_pages: int = Field(1_000_000, ge=1, le=2**30)
    """Bound on page changes that wait or are in flight: 29 MB. A full queue costs a resync, not correctness."""
    batch_pages: int = Field(8192, ge=1, le=MAX_PAGES_PER_BATCH)
    """Most pages of a record."""
    batch_bytes: int = Field(262_144, ge=1024, le=MAX_RECORD_BYTES - _RECORD_OVERHEAD_BYTES)
    """Bytes at which a record is closed."""
    linger_ms: float = Field(5.0, ge=0)
    """Shortest time between two records. The first event after a pause is sent at once; under load, records fill."""
    heartbeat_s: float = Field(HEARTBEAT_S, gt=0)
    """Interval of records without events while nothing happens. Well below the indexer's `worker_ttl_s`."""
    resync_min_interval_s: float = Field(1.0, ge=0)
    """Shortest time between two resyncs."""
    resync_jitter_s: float = Field(0.5, ge=0)
    """A requested resync waits for a random time up to this, so that workers do not answer all at once."""

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
            raise InvalidValueError("batch_bytes", self.batch_bytes, expected)
        return self

    @property
    def stream(self) -> StreamId:
        """Name of the publisher's stream."""
        return StreamId(self.model, self.tenant, self.worker, self.dp_rank)
