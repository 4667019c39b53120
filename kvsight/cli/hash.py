"""`kvsight hash`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from kv_events.errors import InvalidValueError
from kv_events.hash_seed import SEED_VARIABLE, parse_seed, process_seed
from kv_events.limits import MAX_BLOCK_SIZE
from kvsight.cli.console import UsageError, out, print_json, waiting
from kvsight.cli.prompts import parse_tokens, read_tokens

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


def hash_prompt(
    tokens: Annotated[list[str] | None, typer.Argument(help="Token ids, separated by spaces or commas.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help='File with the ids, text or JSON; "-": stdin.'),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per page.", min=1, max=MAX_BLOCK_SIZE)] = 16,
    seed: Annotated[str | None, typer.Option(help='A number, or "dynamo" (1337).', show_default=SEED_VARIABLE)] = None,
    lora: Annotated[str | None, typer.Option(help="Name of a LoRA adapter.")] = None,
    salt: Annotated[str | None, typer.Option(help="Cache salt.")] = None,
    eagle: Annotated[bool, typer.Option("--eagle", help="Pages consist of token pairs (EAGLE).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the hashes of a prompt's pages in every standard.

    These are the standards of routers and engines. Shows why a router and an engine disagree.
    A partial last page has no hash.

    Example: kvsight hash 1 2 3 4 5 6 7 8 --block-size 4
    """
    prompt = _tokens(tokens or [], file)
    base = process_seed() if seed is None else parse_seed(seed, "--seed")
    with waiting("loading kernels"):
        hashes = hashes_of(prompt, block_size, base, _name("--lora", lora), _name("--salt", salt), is_bigram=eagle)
    if as_json:
        print_json(hashes)
    else:
        out.print(_table(hashes))


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


def _name(option: str, text: str | None) -> str | None:
    """The name, or None for an empty one. Raises InvalidValueError."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise InvalidValueError(option, text, "text that UTF-8 can hold") from None
    return text or None


def _tokens(words: list[str], file: Path | None) -> U32Array:
    from kv_events.tokens import token_array

    if bool(words) == (file is not None):
        raise UsageError("give either token ids or --file")
    return token_array(parse_tokens(" ".join(words)) if file is None else read_tokens(file))


def _table(hashes: PromptHashes) -> Table | str:
    if not hashes.seq_hashes:
        return f"{hashes.num_tokens} tokens: less than one page of {hashes.block_size}"
    table = Table(title=f"{len(hashes.seq_hashes)} pages of {hashes.block_size} tokens, seed {hashes.seed}")
    table.add_column("standard")
    table.add_column("page", justify="right")
    table.add_column("decimal", justify="right")
    table.add_column("hex")
    for field, title in _TITLES.items():
        for page, value in enumerate(getattr(hashes, field)):
            table.add_row("" if page else title, str(page), str(value), f"{value % 2**64:016x}")
    return table
