"""`kvsight query`"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kv_events.errors import KvsightError
from kv_events.hash_seed import SEED_VARIABLE, parse_seed, process_seed
from kv_events.http.service import DEFAULT_URL
from kv_events.limits import MAX_BLOCK_SIZE
from kv_events.runtime.words import count, partial_page
from kvsight.cli.shared.answers import Asked, answer_lines
from kvsight.cli.shared.console import UsageError, out, print_result, waiting
from kvsight.cli.shared.flags import ApiToken, AsJson, Url
from kvsight.cli.shared.prompts import parse_tokens, read_json_object, read_tokens, text_of
from kvsight.cli.shared.streams import rows_of
from kvsight.cli.shared.tables import Column, table_lines

_TIMEOUT_S = 30.0  # people wait longer than routers
_TITLES = {
    "local_hashes": "RFC #1527, local",
    "seq_hashes": "RFC #1527, rolling",
    "block_hashes": "Dynamo, local, signed",
    "sglang": "SGLang",
    "sglang_dynamo": 'SGLang, "format": "dynamo"',
}
"""JSON field -> standard. `seq_hashes` and `block_hashes` are also fields of POST /query_by_hash."""


def query(
    prompt: Annotated[Path | None, typer.Argument(help='JSON file with the query. "-" reads stdin.')] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Model, with --tokens or --text.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Token ids: 1,2,3 or @FILE.")] = None,
    text: Annotated[str | None, typer.Option(help="Text of the prompt, or @FILE.")] = None,
    tokenize_url: Annotated[str | None, typer.Option(help="An engine that tokenizes --text.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant (routing group).")] = None,
    lora: Annotated[str | None, typer.Option(help="Name of a LoRA adapter.")] = None,
    salt: Annotated[str | None, typer.Option(help="Cache salt.")] = None,
    show_hashes: Annotated[bool, typer.Option("--show-hashes", help="Only print the hashes of its pages.")] = False,
    block_size: Annotated[int, typer.Option(help="Tokens per page of these.", min=1, max=MAX_BLOCK_SIZE)] = 16,
    seed: Annotated[
        str | None, typer.Option(help='Their seed: a number, or "dynamo" (1337).', show_default=SEED_VARIABLE)
    ] = None,
    eagle: Annotated[bool, typer.Option("--eagle", help="Their pages consist of token pairs (EAGLE).")] = False,
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
    as_json: AsJson = False,
) -> None:
    """Ask an indexer how much of a prompt each worker holds.

    The prompt is a file with the body of POST /query or /query_by_hash, such as {"model_name": "m", "token_ids": [1,
    2, 3]}. Or give --model with --tokens, or with --text and --tokenize-url, the address of a vLLM or SGLang engine.

    --show-hashes asks nobody: it prints the hashes of the prompt's pages in every standard of routers and engines,
    which shows why a router and an engine disagree. A partial last page has no hash.

    Example: kvsight query --model my-model --tokens 1,2,3,4
    """
    flags = {"--model": model, "--tokens": tokens, "--text": text, "--tokenize-url": tokenize_url}
    flags |= {"--tenant": tenant, "--lora": lora, "--salt": salt}
    given = [name for name, value in flags.items() if value is not None]
    if prompt is not None:
        if given:
            raise UsageError(f"give either a file or {given[0]}, not both")
        body: dict[str, Any] = dict(read_json_object(prompt))
    else:
        if model is None and (tokens is None or not show_hashes):
            raise UsageError("give a file with the query, or --model with --tokens or --text")
        token_ids = _token_ids(model, tokens, text, tokenize_url)
        fields = {"routing_group": tenant, "lora_name": lora, "cache_salt": salt}
        body = {"model_name": model, "token_ids": token_ids} | {k: v for k, v in fields.items() if v is not None}
    if show_hashes:
        _show_hashes(body, block_size, seed, eagle, as_json)
        return
    from kvsight.client import Client

    with Client(url, token=api_token, timeout_s=_TIMEOUT_S) as client:
        answer = client.query_raw(body)
        asked = Asked.of(body)
        streams = [] if as_json else rows_of(_workers(client, asked))
    print_result(answer, answer_lines(answer, asked, streams, out.width), as_json=as_json)


class _Prompt(msgspec.Struct):
    """What the hashes of a query's prompt depend on."""

    token_ids: list[int]
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool | None = None


def _show_hashes(body: dict[str, Any], block_size: int, seed: str | None, is_eagle: bool, as_json: bool) -> None:
    try:
        prompt = msgspec.json.decode(msgspec.json.encode(body), type=_Prompt)
    except msgspec.DecodeError as error:
        raise UsageError(f"--show-hashes: {error}") from None
    names = prompt.lora_name or None, prompt.cache_salt or None
    base = process_seed() if seed is None else parse_seed(seed, "--seed")
    with waiting("loading kernels"):
        found = hashes_of(prompt.token_ids, block_size, base, *names, is_bigram=is_eagle or bool(prompt.is_eagle))
    print_result(found, _hash_lines(found), as_json=as_json)


def hashes_of(
    prompt: Sequence[int], block_size: int, seed: int, lora: str | None, salt: str | None, *, is_bigram: bool = False
) -> dict[str, Any]:
    """The hashes of a prompt's full pages, by standard. SGLang's are those that 0.5.23 publishes, signed.

    seed: the base seed, to which LoRA name and salt are added. lora: for SGLang, the `extra_key` of its pages.
    """
    from kv_events import hashing
    from kv_events.tokens import token_array

    tokens = token_array(prompt)
    local = hashing.local_hashes(tokens, block_size, hashing.namespace_seed(lora, salt, base=seed), is_bigram=is_bigram)
    chain = hashing.block_hash_chain(tokens, block_size, hashing.salted_prior_hash(salt), is_bigram=is_bigram)
    of_sglang = hashing.hash_strs_to_int64(chain)
    return {
        "block_size": block_size,
        "seed": seed,
        "num_tokens": len(tokens),
        "local_hashes": local.tolist(),
        "seq_hashes": hashing.rolling_hashes(local, base=seed).tolist(),
        "block_hashes": local.view("i8").tolist(),
        "sglang": hashing.namespaced_block_hashes(of_sglang, lora, None).tolist(),
        "sglang_dynamo": hashing.namespaced_block_hashes(of_sglang, lora, salt).tolist(),
    }


def _hash_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["seq_hashes"]:
        yield partial_page(found["num_tokens"], "token", found["block_size"])
        return
    rows = [(title, page, value) for field, title in _TITLES.items() for page, value in enumerate(found[field])]
    columns = [
        Column("standard", ["" if page else title for title, page, _ in rows]),
        Column("page", [page for _, page, _ in rows]),
        Column("decimal", [value for *_, value in rows]),
        Column("hex", [f"{value % 2**64:016x}" for *_, value in rows]),
    ]
    yield f"{count(len(found['seq_hashes']), 'page')} of {found['block_size']} tokens, seed {found['seed']}"
    yield from table_lines(columns, out.width)


def _token_ids(model: str | None, tokens: str | None, text: str | None, tokenize_url: str | None) -> list[int]:
    if tokens is not None and text is not None:
        raise UsageError("give either --tokens or --text, not both")
    if (text is None) != (tokenize_url is None):
        raise UsageError("--text and --tokenize-url belong together")
    if tokens is not None:
        return read_tokens(Path(tokens[1:])) if tokens.startswith("@") else parse_tokens(tokens, "--tokens")
    from kvsight.cli.shared.engine_client import EngineClient

    if model is None or text is None or tokenize_url is None:
        raise UsageError("--model needs --tokens, or --text with --tokenize-url")
    with closing(EngineClient(tokenize_url, field="tokenize_url")) as engine:
        return engine.tokenize(model, text_of(text))


def _workers(client: Any, asked: Asked) -> list[Any]:
    """The workers that were asked. None if the service has no such list: other indexers have the same queries."""
    try:
        found: list[Any] = client.workers(asked.model, asked.tenant)
    except KvsightError:
        return []
    return found
