"""`kvsight query --show-hashes`: the hashes of a prompt's pages in every standard of routers and engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from kvsight.cli.shared.tables import Column, table_lines

if TYPE_CHECKING:
    from kv_events.tokens import U32Array

_TITLES = {
    "local_hashes": "RFC #1527, local",
    "seq_hashes": "RFC #1527, rolling",
    "block_hashes": "Dynamo, local, signed",
    "sglang": "SGLang",
    "sglang_dynamo": 'SGLang, "format": "dynamo"',
}
"""JSON field -> standard. `seq_hashes` and `block_hashes` are also fields of POST /query_by_hash."""


class PromptHashes(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of a prompt's full pages, by standard. SGLang's are those that 0.5.23 publishes, signed."""

    block_size: int
    seed: int
    num_tokens: int
    local_hashes: list[int]
    seq_hashes: list[int]
    block_hashes: list[int]
    sglang: list[int]
    sglang_dynamo: list[int]


def hashes_of(
    prompt: U32Array, block_size: int, seed: int, lora: str | None, salt: str | None, *, is_bigram: bool = False
) -> PromptHashes:
    """Hash a prompt's pages.

    seed: the base seed, to which LoRA name and salt are added. lora: for SGLang, the `extra_key` of
    the adapter's pages.
    """
    from kv_events.hashing import (
        block_hash_chain,
        hash_strs_to_int64,
        local_hashes,
        namespace_seed,
        namespaced_block_hashes,
        rolling_hashes,
        salted_prior_hash,
    )

    local = local_hashes(prompt, block_size, namespace_seed(lora, salt, base=seed), is_bigram=is_bigram)
    chain = hash_strs_to_int64(block_hash_chain(prompt, block_size, salted_prior_hash(salt), is_bigram=is_bigram))
    return PromptHashes(
        block_size=block_size,
        seed=seed,
        num_tokens=len(prompt),
        local_hashes=local.tolist(),
        seq_hashes=rolling_hashes(local, base=seed).tolist(),
        block_hashes=local.view("i8").tolist(),
        sglang=namespaced_block_hashes(chain, lora, None).tolist(),
        sglang_dynamo=namespaced_block_hashes(chain, lora, salt).tolist(),
    )


def hash_lines(hashes: PromptHashes, width: int) -> Iterator[str]:
    """Yield a table of a prompt's hashes, page by page. width: terminal cells."""
    if not hashes.seq_hashes:
        yield f"{hashes.num_tokens} tokens: less than one page of {hashes.block_size}"
        return
    rows = [
        (title, page, value) for field, title in _TITLES.items() for page, value in enumerate(getattr(hashes, field))
    ]
    columns = [
        Column("standard", ["" if page else title for title, page, _ in rows]),
        Column("page", [str(page) for _, page, _ in rows], is_number=True),
        Column("decimal", [str(value) for *_, value in rows], is_number=True),
        Column("hex", [f"{value % 2**64:016x}" for *_, value in rows]),
    ]
    yield f"{len(hashes.seq_hashes)} pages of {hashes.block_size} tokens, seed {hashes.seed}"
    yield from table_lines(columns, width)
