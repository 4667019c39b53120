"""What a service and its explaining process say to each other. This module loads no kernels of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from analysis.explain.asked_prompt import AskedPrompt
from kv_events.log.moments import LogMoment

EXIT_REFUSED = 2
"""Exit code of a process that wrote a `Refusal`."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to explain. The fields of the prompt are those of `AskedPrompt`."""

    folder: str
    """Of the event log."""
    model: str
    tenant: str
    tokens: bytes | None
    """u32, little-endian"""
    hashes: bytes | None
    """u64, little-endian"""
    lora_name: str | None
    cache_salt: str | None
    is_bigram: bool
    block_size: int | None
    worker: str | None
    at: float | None
    """The moment in seconds since 1970. At most one of `at`, `index` and `positions` is given; none: the end of the
    log."""
    index: int | None
    """The moment as an index in the log."""
    positions: dict[int, int] | None
    """The moment as Kafka positions."""
    timeout_s: float
    """Time after which the process ends by itself."""

    @classmethod
    def of(cls, prompt: AskedPrompt, folder: Path, moment: LogMoment, timeout_s: float) -> Self:
        """Return the job to explain a prompt."""
        return cls(
            folder=str(folder),
            model=prompt.model,
            tenant=prompt.tenant,
            tokens=None if prompt.tokens is None else prompt.tokens.astype("<u4", copy=False).tobytes(),
            hashes=None if prompt.hashes is None else prompt.hashes.astype("<u8", copy=False).tobytes(),
            lora_name=prompt.lora_name,
            cache_salt=prompt.cache_salt,
            is_bigram=prompt.is_bigram,
            block_size=prompt.block_size,
            worker=prompt.worker,
            at=moment.time_s,
            index=moment.index,
            positions=None if moment.offsets is None else dict(moment.offsets),
            timeout_s=timeout_s,
        )

    def moment(self) -> LogMoment:
        """Return the moment."""
        return LogMoment(self.index, self.positions, self.at)

    def prompt(self) -> AskedPrompt:
        """Return the prompt to explain."""
        return AskedPrompt(
            self.model,
            self.tenant,
            None if self.tokens is None else np.frombuffer(self.tokens, "<u4"),
            None if self.hashes is None else np.frombuffer(self.hashes, "<u8"),
            self.lora_name,
            self.cache_salt,
            self.is_bigram,
            self.block_size,
            self.worker,
        )


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no explanation."""

    field: str | None
    """The field of the request that does not fit the log. None: the log cannot be read."""
    detail: str
