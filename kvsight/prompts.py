"""A question about one prompt, as the API takes it fastest: fields of a msgpack map, numbers packed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError
from kv_events.tokens import token_array
from kvsight.schemas.queries import TierWeights

Numbers: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


class PromptOptions(TypedDict, total=False):
    """What a question may say besides the prompt."""

    lora_name: str | None
    cache_salt: str | None
    is_eagle: bool
    """The workers' pages are of token pairs, as of EAGLE-type models."""
    tenant: str | None
    """None: the default tenant."""
    tier_weights: TierWeights | None
    """Of gpu, cpu, disk and external, in this order or by name: asks for `weighted`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """How much of a prompt is held, and by whom? The prompt is one of the three lists."""

    model: str
    token_ids: Numbers | None = None
    """u32."""
    seq_hashes: Numbers | None = None
    """Rolling hashes, unsigned; LoRA name and salt are in them."""
    block_hashes: Numbers | None = None
    """Local hashes, signed, as Dynamo's clients compute them."""
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool = False
    tenant: str | None = None
    tier_weights: TierWeights | None = None

    def body(self) -> dict[str, object]:
        """The request's fields. Raises InvalidValueError."""
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
    """Little-endian bytes: u32 tokens, u64 or i64 hashes."""
    if field == "token_ids":
        return token_array(numbers).astype("<u4", copy=False).tobytes()
    typecode, dtype, expected = ("q", "<i8", "signed") if field == "block_hashes" else ("Q", "<u8", "unsigned")
    try:
        words = array(typecode, numbers.tolist() if isinstance(numbers, np.ndarray) else numbers)
    except (OverflowError, TypeError):
        raise InvalidValueError(field, numbers, f"{expected} integers of 64 bits") from None
    return np.asarray(words).astype(dtype, copy=False).tobytes()
