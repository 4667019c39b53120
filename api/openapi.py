"""OpenAPI documentation generated from msgspec structs, which FastAPI does not understand.

FastAPI routes declare their answers with `answers` and `problem`. `complete` adds the query routes, which FastAPI does
not know, and the component schemas to which both refer.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from http import HTTPStatus
from inspect import cleandoc
from typing import Any

import msgspec

from api.access.guard import OPEN_PATHS
from api.problems import MEDIA_TYPE
from api.queries.body_formats import CONTENT_TYPES
from indexer.views import ViewCounters
from kv_events.http.decisions import DecisionRequest, DecisionsAccepted, OutcomeRequest
from kv_events.http.explanations import ExplainRequest, Explanation
from kv_events.http.fleet import Tokenized, TokenizeRequest
from kv_events.http.queries import IntList, PeerAnswer, PeerQuery, RfcAnswer, RfcQuery
from kv_events.http.registrations import (
    PeerRegistered,
    PeerRegistration,
    PeerUnregistration,
    RfcRegistered,
    RfcRegistration,
    RfcUnregistered,
    RfcUnregistration,
)
from kv_events.http.selection import Load, OverlapScores, Reservation, ReserveRequest, Selection, SelectRequest
from kv_events.http.service import ProblemDocument
from kv_events.http.workers import Listener

Json = dict[str, Any]
Responses = dict[int | str, Json]

_TEMPLATE = "#/components/schemas/{name}"
_REFERENCE = re.compile('"#/components/schemas/([^"]+)"')
_components: dict[str, Json] = {}
"""Schemas of the structs that routes name, and of those in them."""
_HELD = "The tokens that each worker holds"
_BODY_PROBLEMS = {
    "413": "The body is too large",
    "415": "The body is neither JSON nor msgpack",
    "422": "A field is missing or invalid",
}
_QUERY_PROBLEMS = {
    "400": "The body is malformed, no worker uses this block size, or a salt was given with local hashes",
    "404": "The model is unknown, or the prompt is text and the service knows no tokenizer",
    "503": "Nothing can be answered yet, or the tokenizer cannot be asked",
    **_BODY_PROBLEMS,
}
_EXPLAIN_PROBLEMS = {
    "400": "The body is malformed",
    "404": "No worker of the log serves the model, the worker is not in the log, or the service keeps no log",
    "429": "Another explanation is being made",
    "503": "The log cannot be read, or not within a minute",
    **_BODY_PROBLEMS,
}
_PROMPT: Json = {"model_name": "my-model", "token_ids": [*range(1, 17)]}
_EXAMPLES: dict[str, Json] = {
    "/query": _PROMPT,
    "/query_by_hash": {"model_name": "my-model", "seq_hashes": [9125347086143215829, 3514062934876510234]},
    "/query/batch": {"queries": [_PROMPT, {"model": "my-model", "block_size": 16, "token_ids": [*range(1, 17)]}]},
    "/register": {"instance_id": "engine-0", "endpoint": "tcp://10.0.0.1:5557", "model_name": "my-model"}
    | {"replay_endpoint": "tcp://10.0.0.1:5558", "block_size": 16},
    "/unregister": {"instance_id": "engine-0", "model_name": "my-model"},
    "/decisions": {"request_id": "request-1", "worker": "engine-0", "predicted_tokens": 16, **_PROMPT}
    | {"candidates": [{"worker": "engine-0", "tokens": 16, "score": 16.0}, {"worker": "engine-1"}]},
    "/explain": {"worker": "engine-0", **_PROMPT},
    "/tokenize": {"model_name": "my-model", "text": "Once upon a time"},
    **dict.fromkeys(("/select", "/select_and_reserve", "/potential_loads", "/overlap_scores"), _PROMPT),
    "/reservations": {"selection_id": "request-1", "model_name": "my-model"},
}
"""Path -> a body that the service takes as it is, but for its names."""
_REGISTRATION_PROBLEMS = {
    "400": "The body or an address is malformed",
    "403": "This service may not connect to the address",
    "404": "No such registration, or this service reads a log and no engines",
    "409": "The registration contradicts another one, or a limit is reached",
    "503": "The saved registrations cannot be read at the moment",
    **_BODY_PROBLEMS,
}
_SELECTION_PROBLEMS = {
    "400": "The body is malformed, or the prompt is missing",
    "404": "No such selection or worker",
    "409": "The id is reserved already, or the workers of the model use several block sizes",
    "503": "No worker can be chosen, or the book is full",
    **_BODY_PROBLEMS,
}


def answers(kind: Any, description: str, status: int = HTTPStatus.OK) -> Responses:
    """Return the `responses` entry of a FastAPI route that answers with a struct or a list of structs."""
    return {int(status): _json(description, _schema(kind, is_sent=True))}


def problem(status: int, description: str) -> Responses:
    """Return the `responses` entry of a FastAPI route for one kind of problem document."""
    return {int(status): _problem(description)}


def body_of(kind: Any, example: Json) -> Json:
    """Return the `openapi_extra` of a FastAPI route whose body is a struct."""
    shown = {"schema": _schema(kind), "example": example}
    return {"requestBody": {"required": True, "content": dict.fromkeys(CONTENT_TYPES, shown)}}


def complete(document: Json, amend: Callable[[Json], None], *, needs_token: bool) -> None:
    """Add the query routes and, if there is one, the bearer token to the document of FastAPI, then let `amend` change
    it, and add the component schemas to which it refers.
    """
    paths = document["paths"]
    for operation in (each for path in paths.values() for each in path.values()):
        # FastAPI makes "Fleet" of the function's name; the first sentence of its docstring says more
        operation["summary"], _, rest = operation.pop("description").replace("\n", " ").partition(". ")
        operation["summary"] = operation["summary"].removesuffix(".")
        operation |= {"description": rest.strip()} if rest else {}
    paths |= {path: each for path, each in _posts() if "/loads" in paths or "selection" not in each["post"]["tags"]}
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    if needs_token:
        _require_token(document)
    amend(document)
    new = _referenced(paths)
    while new:
        schemas |= {name: _components[name] for name in new}
        new = _referenced([_components[name] for name in new]) - schemas.keys()


def _posts() -> Iterator[tuple[str, Json]]:
    """Yield the routes that FastAPI does not know. Members of groups, which choose no workers, lack those to select."""
    query, result = _any_of(PeerQuery[IntList], RfcQuery[IntList]), _any_of(PeerAnswer, RfcAnswer, are_sent=True)
    held: Responses = {"200": _json(_HELD, result)}
    results = _any_of(PeerAnswer, RfcAnswer, ProblemDocument, are_sent=True)
    text = "How much of a prompt each worker holds. The prompt is given by `token_ids`, or by `messages`, `prompt` or "
    text += (
        "`input` as in the bodies of OpenAI's and Anthropic's clients. Workers hold whole pages, so the answer to less "
    )
    text += "than `block_size` tokens is empty."
    yield _post("/query", "queries", text, query, held, _QUERY_PROBLEMS)
    text = "How much of a prompt each worker holds. The prompt is given by `seq_hashes` (rolling, unsigned) or "
    text += "`block_hashes` (local, signed)."
    yield _post("/query_by_hash", "queries", text, query, held, _QUERY_PROBLEMS)
    text = "Several queries at once, by tokens or by hashes. A refused query has a problem document as its result."
    found: Responses = {"200": _json(_HELD, _array("results", results))}
    yield _post("/query/batch", "queries", text, _array("queries", query), found, _QUERY_PROBLEMS)

    text = "Let this service read one rank of an engine. Repeating a registration changes nothing."
    registered = _any_of(PeerRegistered, RfcRegistered, are_sent=True)
    found = {"200": _json("Registered (in Dynamo's dialect: it was registered before)", registered)}
    found |= {"201": _json("Registered, in Dynamo's dialect", registered)}
    yield _post("/register", "workers", text, _any_of(PeerRegistration, RfcRegistration), found, _REGISTRATION_PROBLEMS)
    text = "Stop reading an engine, all ranks or one, and drop its pages."
    found = {"200": _json("Unregistered", _any_of(PeerRegistered, RfcUnregistered, are_sent=True))}
    body = _any_of(PeerUnregistration, RfcUnregistration)
    yield _post("/unregister", "workers", text, body, found, _REGISTRATION_PROBLEMS)

    def select(path: str, text: str, kind: Any, chosen: Any, status: int = HTTPStatus.OK) -> tuple[str, Json]:
        taken = answers(chosen, "The answer", status)
        return _post(path, "selection", text, _schema(kind), taken, _SELECTION_PROBLEMS)

    yield select("/select", "Choose a worker for a prompt, and book nothing.", SelectRequest, Selection)
    text = "Choose a worker for a prompt, and book the request."
    yield select("/select_and_reserve", text, SelectRequest, Selection)
    text = "What would be booked on each rank with this prompt."
    yield select("/potential_loads", text, SelectRequest, list[Load])
    yield select("/overlap_scores", "Pages of a prompt that each rank holds.", SelectRequest, OverlapScores)
    text = "Book what `/select` answered for this `selection_id`, or, with a `worker_id`, what the caller chose."
    yield select("/reservations", text, ReserveRequest, Reservation, HTTPStatus.CREATED)

    decision = {"allOf": [_schema(DecisionRequest), query]}
    record = {"anyOf": [decision, _schema(OutcomeRequest)]}
    body = {"anyOf": [decision, _schema(OutcomeRequest), _array("decisions", record)]}
    problems = {"400": "The body is malformed", **_BODY_PROBLEMS}
    text = "What a router chose for a request, or what the engine reused for it (`cached_tokens`), or several of both. "
    text += "The records are queued for the log of the service and never waited for."
    taken = answers(DecisionsAccepted, "Accepted", HTTPStatus.ACCEPTED)
    yield _post("/decisions", "decisions", text, body, taken, problems)
    text = (
        "Why each worker holds no more of a prompt, from the log that the service keeps: the page at which its prefix "
    )
    text += "ends, the cause, and the batches that show it."
    asked, explained = {"allOf": [_schema(ExplainRequest), query]}, answers(Explanation, "The cause for each worker")
    yield _post("/explain", "queries", text, asked, explained, _EXPLAIN_PROBLEMS)
    text = "The tokens of a text, from --tokenizer-file or the engine at --tokenize-url."
    problems = {"404": "The service knows no tokenizer", "503": "The tokenizer cannot be asked", **_BODY_PROBLEMS}
    yield _post("/tokenize", "queries", text, _schema(TokenizeRequest), answers(Tokenized, "The tokens"), problems)


def _referenced(part: Any) -> set[str]:
    """Return the structs to which a part of the document refers."""
    return set(_REFERENCE.findall(json.dumps(part))) & _components.keys()


def _require_token(document: Json) -> None:
    """Declare the bearer token, so that pages made from the document ask for it."""
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path in OPEN_PATHS & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []


def _post(
    path: str, tag: str, text: str, body: Json, successes: Responses, problems: dict[str, str]
) -> tuple[str, Json]:
    operation = {
        "tags": [tag],
        "summary": text,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {
            "required": True,
            "content": {name: {"schema": body, "example": _EXAMPLES[path]} for name in CONTENT_TYPES},
        },
        "responses": successes | {status: _problem(reason) for status, reason in sorted(problems.items())},
    }
    return path, {"post": operation}


def _json(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _problem(description: str) -> Json:
    return {"description": description, "content": {MEDIA_TYPE: {"schema": _schema(ProblemDocument, is_sent=True)}}}


def _any_of(*kinds: Any, are_sent: bool = False) -> Json:
    return {"anyOf": [_schema(kind, is_sent=are_sent) for kind in kinds]}


def _array(field: str, items: Json) -> Json:
    return {"type": "object", "properties": {field: {"type": "array", "items": items}}, "required": [field]}


@cache
def _schema(kind: Any, *, is_sent: bool = False) -> Json:
    """Return the schema of a struct, and keep those of all structs in it. is_sent: whether this server sends it.

    The fields that it always sends are required then. Their defaults exist for clients of older servers.
    """
    (schema,), components = msgspec.json.schema_components([kind], ref_template=_TEMPLATE)
    for name, component in components.items():
        component["description"] = cleandoc(component["description"])
        fields = component.get("properties", {})
        if is_sent:
            required = component.get("required", ())
            component["required"] = [each for each in fields if each in required or "default" in fields[each]]
            for field in fields.values():
                field.pop("default", None)
        if name == Listener.__name__:
            fields["counters"]["properties"] = {field: {"type": "integer"} for field in ViewCounters.__slots__}
        _components.setdefault(name, component)
    return schema
