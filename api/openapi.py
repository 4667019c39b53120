"""Documentation of the routes that FastAPI does not see, out of their msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec

from api.decoding import CONTENT_TYPES
from api.problems import MEDIA_TYPE, ProblemDocument
from api.registration_schemas import (
    PeerRegistered,
    PeerRegistration,
    PeerUnregistration,
    RfcRegistered,
    RfcRegistration,
    RfcUnregistered,
    RfcUnregistration,
)
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
_REGISTRATION_ERRORS = {
    "400": "The body or an address cannot be read",
    "403": "An address that this service may not connect to",
    "404": "Nothing of that kind is registered; or this service reads no engines itself",
    "409": "Registered already, otherwise",
    "413": "The body is too large",
    "415": "Neither JSON nor msgpack",
    "422": "A field is missing or not acceptable",
    "503": "What was registered before cannot be read at present",
}
_REGISTRATIONS = {
    "/register": (
        "Have this service read one rank of an engine. The same registration again changes nothing.",
        (PeerRegistration, RfcRegistration, PeerRegistered, RfcRegistered),
        {"200": "Reads it (already, in the running peer's dialect)", "201": "Reads it, in the running peer's dialect"},
    ),
    "/unregister": (
        "Stop reading an engine, all ranks or one, and drop its pages.",
        (PeerUnregistration, RfcUnregistration, PeerRegistered, RfcUnregistered),
        {"200": "Done"},
    ),
}


def add_hot_routes(document: dict[str, Any]) -> None:
    """Add /query, /query_by_hash, /query/batch, /register and /unregister to an OpenAPI document."""
    query_types = (PeerQuery[IntList], RfcQuery[IntList], PeerAnswer, RfcAnswer, ProblemDocument)
    (peer, rfc, peer_answer, rfc_answer, problem), components = msgspec.json.schema_components(
        query_types, ref_template=_TEMPLATE
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    query, result = {"anyOf": [peer, rfc]}, {"anyOf": [peer_answer, rfc_answer]}
    for path, text in _TEXTS.items():
        document["paths"][path] = {"post": _operation(path, text, query, result, problem)}
    queries = _object("queries", {"type": "array", "items": query})
    results = _object("results", {"type": "array", "items": {"anyOf": [peer_answer, rfc_answer, problem]}})
    document["paths"]["/query/batch"] = {"post": _operation("/query/batch", _BATCH_TEXT, queries, results, problem)}
    for path, (text, types, successes) in _REGISTRATIONS.items():
        (peer, rfc, peer_answer, rfc_answer), components = msgspec.json.schema_components(types, ref_template=_TEMPLATE)
        document["components"]["schemas"].update(components)
        operation = _operation(path, text, {"anyOf": [peer, rfc]}, {"anyOf": [peer_answer, rfc_answer]}, problem)
        operation["tags"] = ["workers"]
        found = operation["responses"]["200"]
        operation["responses"] = {status: {**found, "description": said} for status, said in successes.items()}
        operation["responses"] |= _problems(_REGISTRATION_ERRORS, problem)
        document["paths"][path] = {"post": operation}


def _object(field: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {field: schema}, "required": [field]}


def _operation(
    path: str, text: str, body: dict[str, Any], answer: dict[str, Any], problem: dict[str, Any]
) -> dict[str, Any]:
    found = {"description": "What every worker holds, in tokens", "content": {"application/json": {"schema": answer}}}
    return {
        "tags": ["queries"],
        "summary": text,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {name: {"schema": body} for name in CONTENT_TYPES}},
        "responses": {"200": found, **_problems(_ERRORS, problem)},
    }


def _problems(errors: dict[str, str], problem: dict[str, Any]) -> dict[str, Any]:
    return {
        status: {"description": reason, "content": {MEDIA_TYPE: {"schema": problem}}}
        for status, reason in errors.items()
    }
