"""Prompts, and what routers report about them: their choices, and what the engines reused.

They travel in the form that the API decodes fastest: a msgpack map with packed numbers.
"""

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError, check_type
from kv_events.http.queries import TierWeights
from kv_events.tokens import token_array
from kvsight.choice import WorkerChoice

Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A query: which workers hold how much of a prompt? Exactly one of the three lists gives the prompt."""

    model: str
    token_ids: Integers | None = None
    """u32."""
    seq_hashes: Integers | None = None
    """Rolling hashes, u64. They include the LoRA name and the salt."""
    block_hashes: Integers | None = None
    """Local hashes, i64, as Dynamo's clients compute them."""
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool = False
    """The workers' pages consist of token pairs (EAGLE-type models)."""
    tenant: str | None = None
    """None selects the default tenant."""
    tier_weights: TierWeights | None = None
    """Weights of gpu, cpu, disk and external, in this order or by name. Requests the `weighted` fields."""

    def body(self) -> dict[str, object]:
        """The fields of the request. Raises InvalidValueError."""
        check_type("model", self.model, str)
        return given(
            {
                "model_name": self.model,
                **self._numbers(),
                "lora_name": self.lora_name,
                "cache_salt": self.cache_salt,
                "is_eagle": self.is_eagle or None,
                "routing_group": self.tenant,
                "tier_weights": self.tier_weights,
            }
        )

    def _numbers(self) -> dict[str, bytes]:
        lists = {"token_ids": self.token_ids, "seq_hashes": self.seq_hashes, "block_hashes": self.block_hashes}
        packed = {name: _packed(name, numbers) for name, numbers in lists.items() if numbers is not None}
        if len(packed) != 1:
            raise InvalidValueError("prompt", " and ".join(packed) or "nothing", f"one of {', '.join(lists)}")
        return packed


@dataclass(frozen=True, slots=True)
class Decision:
    """What a router chose for one request."""

    request_id: str
    """Any id of at most 256 bytes that no other request has. The outcome has the same."""
    prompt: Prompt
    """The prompt with its model, tenant, adapter and salt, as in the query. The service keeps its hashes, no tokens."""
    worker: str
    """The worker that was chosen."""
    dp_rank: int | None = None
    predicted_tokens: int | None = None
    """Tokens that the worker held according to the answer. None: the router did not ask, or got no answer."""
    candidates: Sequence[WorkerChoice] = ()
    """All workers among which the router chose, such as the result of `rank_workers`. At most 1024."""
    timestamp: float = field(default_factory=time.time)
    """Time of the choice, in seconds since 1970."""

    def body(self) -> dict[str, object]:
        """The fields of the request. Raises InvalidValueError."""
        check_type("prompt", self.prompt, Prompt)
        return {
            **self.prompt.body(),
            "request_id": self.request_id,
            "worker": self.worker,
            "dp_rank": self.dp_rank,
            "predicted_tokens": self.predicted_tokens,
            "candidates": [choice._asdict() for choice in self.candidates],
            "timestamp": self.timestamp,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine reused for a request."""

    request_id: str
    cached_tokens: int
    """`usage.prompt_tokens_details.cached_tokens` of the engine's answer."""
    timestamp: float = field(default_factory=time.time)
    """Time of the answer's first token, in seconds since 1970."""

    def body(self) -> dict[str, object]:
        """The fields of the request."""
        return {"request_id": self.request_id, "cached_tokens": self.cached_tokens, "timestamp": self.timestamp}


def given(fields: Mapping[str, _T | None]) -> dict[str, _T]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _packed(name: str, numbers: Integers) -> bytes:
    """Pack numbers as little-endian bytes: u32 tokens, u64 or i64 hashes."""
    if name == "token_ids":
        return token_array(numbers).astype("<u4", copy=False).tobytes()
    typecode, dtype, expected = ("q", "<i8", "signed") if name == "block_hashes" else ("Q", "<u8", "unsigned")
    try:
        words = array(typecode, numbers.tolist() if isinstance(numbers, np.ndarray) else numbers)
    except (OverflowError, TypeError):
        raise InvalidValueError(name, numbers, f"{expected} integers of 64 bits") from None
    return np.asarray(words).astype(dtype, copy=False).tobytes()
