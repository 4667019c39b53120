"""What a service and its explaining process say to each other. This module loads no kernels of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from analysis.explain.asked_prompt import AskedPrompt
from kv_events.http.parsed_query import ParsedQuery
from kv_events.log.moments import LogMoment

EXIT_REFUSED = 2
"""Exit code of a process that wrote a `Refusal`."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to explain."""

    folder: str
    """Of the event log."""
    query: ParsedQuery
    numbers: bytes
    """Of the prompt, little-endian: u32 tokens or u64 hashes."""
    named: str | None
    """See `AskedPrompt`."""
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
            query=prompt.query,
            numbers=prompt.numbers.tobytes(),
            named=prompt.named,
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
        kind = "<u4" if self.query.field == "token_ids" else "<u8"
        return AskedPrompt(self.query, np.frombuffer(self.numbers, kind), self.named)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no explanation."""

    field: str | None
    """The field of the request that does not fit the log. None: the log cannot be read."""
    detail: str
