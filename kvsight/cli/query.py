"""`kvsight query`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kv_events.errors import KvsightError
from kv_events.http.service import DEFAULT_URL
from kvsight.cli.answers import Asked, answer_lines
from kvsight.cli.console import UsageError, out, print_json, print_lines, read_json_object
from kvsight.cli.options import ApiToken, AsJson, Url
from kvsight.cli.prompts import parse_tokens, read_text, read_tokens, tokenize
from kvsight.cli.streams import rows_of

_TIMEOUT_S = 30.0  # people wait longer than routers


def query(
    prompt: Annotated[Path | None, typer.Argument(help='JSON file with the query. "-" reads stdin.')] = None,
    model: Annotated[str | None, typer.Option(help="Model, with --tokens or --text.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Token ids: 1,2,3 or @FILE.")] = None,
    text: Annotated[str | None, typer.Option(help="Text of the prompt, or @FILE.")] = None,
    tokenize_url: Annotated[str | None, typer.Option(help="An engine that tokenizes --text.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant (routing group).")] = None,
    lora: Annotated[str | None, typer.Option(help="Name of a LoRA adapter.")] = None,
    salt: Annotated[str | None, typer.Option(help="Cache salt.")] = None,
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running indexer how much of a prompt each worker holds.

    The prompt is a file with the body of POST /query or /query_by_hash, such as {"model_name": "m", "token_ids": [1,
    2, 3]}. Or give --model with --tokens, or with --text and --tokenize-url, the address of a vLLM or SGLang engine.

    Example: kvsight query --model my-model --tokens 1,2,3,4
    """
    from kvsight.client import Client

    flags = {"--model": model, "--tokens": tokens, "--text": text, "--tokenize-url": tokenize_url}
    flags |= {"--tenant": tenant, "--lora": lora, "--salt": salt}
    given = [name for name, value in flags.items() if value is not None]
    if prompt is not None:
        if given:
            raise UsageError(f"give either a file or {given[0]}, not both")
        body: dict[str, Any] = dict(read_json_object(prompt))
    else:
        if model is None:
            raise UsageError("give a file with the query, or --model with --tokens or --text")
        token_ids = _token_ids(model, tokens, text, tokenize_url)
        fields = {"routing_group": tenant, "lora_name": lora, "cache_salt": salt}
        body = {"model_name": model, "token_ids": token_ids} | {k: v for k, v in fields.items() if v is not None}
    with Client(url, token=api_token, timeout_s=_TIMEOUT_S) as client:
        answer = client.query_raw(body)
        if as_json:
            print_json(answer)
        else:
            asked = Asked.of(decoded(body))
            print_lines(answer_lines(answer, asked, rows_of(_workers(client, asked)), out.width))


def decoded(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a query that was accepted, as plain values."""
    import msgspec

    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(body))
    return fields


def _token_ids(model: str, tokens: str | None, text: str | None, tokenize_url: str | None) -> list[int]:
    if tokens is not None and text is not None:
        raise UsageError("give either --tokens or --text, not both")
    if (text is None) != (tokenize_url is None):
        raise UsageError("--text and --tokenize-url belong together")
    if tokens is not None:
        return read_tokens(Path(tokens[1:])) if tokens.startswith("@") else parse_tokens(tokens, "--tokens")
    if text is None or tokenize_url is None:
        raise UsageError("--model needs --tokens, or --text with --tokenize-url")
    return tokenize(tokenize_url, model, read_text(Path(text[1:])) if text.startswith("@") else text)


def _workers(client: Any, asked: Asked) -> list[Any]:
    """The workers that were asked. None if the service has no such list: other indexers have the same queries."""
    try:
        found: list[Any] = client.workers(asked.model, asked.tenant)
    except KvsightError:
        return []
    return found
