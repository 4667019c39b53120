"""Documentation of the hot routes, which FastAPI does not see, out of their msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec

from api.decoding import CONTENT_TYPES
from api.problems import MEDIA_TYPE, ProblemDocument
from api.schemas import IntList, PeerAnswer, PeerQuery, RfcAnswer, RfcQuery

_TEMPLATE = "#/components/schemas/{name}"
_TEXTS = {
    "/query": "How much of a prompt, given by its tokens, every worker holds. Takes token_ids.",
    "/query_by_hash": "The same by hashes: seq_hashes (rolling, unsigned) or block_hashes (local, signed).",
}
_BATCH_TEXT = "Several questions at once, by tokens or by hashes. A problem of one stands in its place."
_ERRORS = {
    "400": "The body cannot be read, the block size is nobody's, or a salt comes with local hashes",
    "404": "Unknown model",
    "413": "The body is too large",
    "415": "Neither JSON nor msgpack",
    "422": "A field is missing or not acceptable",
}


def add_hot_routes(document: dict[str, Any]) -> None:
    """Add /query, /query_by_hash and /query/batch to an OpenAPI document."""
    types = (PeerQuery[IntList], RfcQuery[IntList], PeerAnswer, RfcAnswer, ProblemDocument)
    (peer, rfc, peer_answer, rfc_answer, problem), components = msgspec.json.schema_components(
        types, ref_template=_TEMPLATE
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    query, result = {"anyOf": [peer, rfc]}, {"anyOf": [peer_answer, rfc_answer]}
    for path, text in _TEXTS.items():
        document["paths"][path] = {"post": _operation(path, text, query, result, problem)}
    queries = _object("queries", {"type": "array", "items": query})
    results = _object("results", {"type": "array", "items": {"anyOf": [peer_answer, rfc_answer, problem]}})
    document["paths"]["/query/batch"] = {"post": _operation("/query/batch", _BATCH_TEXT, queries, results, problem)}


def _object(field: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {field: schema}, "required": [field]}


def _operation(
    path: str, text: str, body: dict[str, Any], answer: dict[str, Any], problem: dict[str, Any]
) -> dict[str, Any]:
    errors = {
        status: {"description": reason, "content": {MEDIA_TYPE: {"schema": problem}}}
        for status, reason in _ERRORS.items()
    }
    found = {"description": "What every worker holds, in tokens", "content": {"application/json": {"schema": answer}}}
    return {
        "tags": ["queries"],
        "summary": text,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {name: {"schema": body} for name in CONTENT_TYPES}},
        "responses": {"200": found, **errors},
    }
