"""Queries about one prompt in the form that the API decodes fastest: a msgpack map with packed numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError, check_type
from kv_events.http.queries import TierWeights
from kv_events.tokens import token_array

Numbers: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A query: which workers hold how much of a prompt? Exactly one of the three lists gives the prompt."""

    model: str
    token_ids: Numbers | None = None
    """u32."""
    seq_hashes: Numbers | None = None
    """Rolling hashes, u64. They include the LoRA name and the salt."""
    block_hashes: Numbers | None = None
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
        fields: dict[str, object] = {
            "model_name": self.model,
            **self._numbers(),
            "lora_name": self.lora_name,
            "cache_salt": self.cache_salt,
            "is_eagle": self.is_eagle or None,
            "routing_group": self.tenant,
            "tier_weights": self.tier_weights,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _numbers(self) -> dict[str, bytes]:
        lists = {"token_ids": self.token_ids, "seq_hashes": self.seq_hashes, "block_hashes": self.block_hashes}
        given = {field: _packed(field, numbers) for field, numbers in lists.items() if numbers is not None}
        if len(given) != 1:
            raise InvalidValueError("prompt", " and ".join(given) or "nothing", f"one of {', '.join(lists)}")
        return given


def _packed(field: str, numbers: Numbers) -> bytes:
    """Pack numbers as little-endian bytes: u32 tokens, u64 or i64 hashes."""
    if field == "token_ids":
        return token_array(numbers).astype("<u4", copy=False).tobytes()
    typecode, dtype, expected = ("q", "<i8", "signed") if field == "block_hashes" else ("Q", "<u8", "unsigned")
    try:
        words = array(typecode, numbers.tolist() if isinstance(numbers, np.ndarray) else numbers)
    except (OverflowError, TypeError):
        raise InvalidValueError(field, numbers, f"{expected} integers of 64 bits") from None
    return np.asarray(words).astype(dtype, copy=False).tobytes()
