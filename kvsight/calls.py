"""The API's calls without any transport: the request to send, and how to read the answer.

Each function has a method of the same name in both clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import UNSET

from kv_events.http.decisions import DecisionsAccepted
from kv_events.http.explanations import Explanation
from kv_events.http.fleet import Fleet
from kv_events.http.queries import BatchAnswer, PeerAnswer, TierWeights
from kv_events.http.selection import ModelLoads, Selection
from kv_events.http.service import ProblemDocument
from kv_events.http.workers import RadixView, ResyncAccepted, Worker
from kv_events.tokens import token_array
from kvsight.choice import DEFAULT_TIER_WEIGHTS, NO_WORKER, WorkerChoice, check_load
from kvsight.choice import rank_workers as ranked
from kvsight.errors import KvsightHttpError, UnexpectedAnswerError
from kvsight.prompts import Decision, Integers, Outcome, Prompt, given

T = TypeVar("T")
Params: TypeAlias = Mapping[str, str | int | None]

_JSON = "application/json"
_MSGPACK = "application/msgpack"
_BOOKED = ("selection_id", "model_name", "routing_group", "worker_id", "sequence_hashes", "isl_tokens")
_BY_HASH = frozenset({"seq_hashes", "block_hashes", "block_hash"})
_UNKNOWN_MODEL = "urn:kvsight:problem:unknown-model"
_LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and how to read its answer."""

    method: str
    path: str
    read: Callable[[bytes], T]
    """Reads the body of an answer. Raises msgspec.DecodeError."""
    params: Params | None = None
    content: bytes | None = None
    content_type: str | None = None
    may_repeat: bool = True
    """Whether the request is retried after a broken connection, a 429 or a 503."""
    refused: Callable[[KvsightHttpError], T] | None = None
    """Turns a refusal into a result, or raises it. None: every refusal is raised."""
    candidates: Set[str] = frozenset()
    """Names of workers from the caller. The client warns of those that the service does not know."""

    def result(self, url: str, status: int, content: bytes) -> T:
        """Read an answer. url: for error messages. Raises KvsightHttpError, UnexpectedAnswerError."""
        where = f"{url}{self.path}"
        if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            refusal = _refusal(where, status, content)
            if self.refused is None:
                raise refusal
            return self.refused(refusal)
        try:
            return self.read(content)
        except msgspec.DecodeError as error:
            raise UnexpectedAnswerError(
                f"{where}: status {status}, but not an answer of a kvsight API: {error}"
            ) from error


# --- queries --------------------------------------------------------------------------------------------------------


def query(
    model: str,
    token_ids: Integers,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
    tenant: str | None = None,
    tier_weights: TierWeights | None = None,
) -> Call[PeerAnswer]:
    """How much of a prompt each worker holds. The prompt is given by its tokens.

    is_eagle: the workers' pages consist of token pairs (EAGLE-type models). tenant: None selects the default tenant.
    tier_weights: of gpu, cpu, disk and external, in this order or by name; requests the `weighted` fields.
    """
    prompt = Prompt(model, token_ids, None, None, lora_name, cache_salt, is_eagle, tenant, tier_weights)
    return _query(prompt.body(), _MSGPACK, partial(decode, PeerAnswer))


def query_by_hash(
    model: str,
    *,
    seq_hashes: Integers | None = None,
    block_hashes: Integers | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
    tenant: str | None = None,
    tier_weights: TierWeights | None = None,
) -> Call[PeerAnswer]:
    """How much of a prompt each worker holds. Its pages are given as rolling unsigned or local signed hashes."""
    prompt = Prompt(model, None, seq_hashes, block_hashes, lora_name, cache_salt, is_eagle, tenant, tier_weights)
    return _query(prompt.body(), _MSGPACK, partial(decode, PeerAnswer))


def query_batch(prompts: Sequence[Prompt]) -> Call[list[PeerAnswer | KvsightHttpError]]:
    """An answer for each prompt, in order. For a refused prompt, the error takes its place and is not raised."""

    def results(data: bytes) -> list[PeerAnswer | KvsightHttpError]:
        return [_batch_result(number, raw) for number, raw in enumerate(decode(BatchAnswer, data).results)]

    return _post("/query/batch", results, {"queries": [prompt.body() for prompt in prompts]})


def query_raw(body: Mapping[str, Any]) -> Call[dict[str, Any]]:
    """Send the fields of a query in either dialect as they are, and return the answer undecoded."""
    return _query(body, _JSON, partial(decode, dict[str, Any]))


def best_worker(
    model: str,
    token_ids: Integers,
    *,
    load: Mapping[str, float] | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
    tenant: str | None = None,
    tier_weights: TierWeights | None = None,
) -> Call[WorkerChoice | None]:
    """Query, and choose a worker by the rule of `kvsight.best_worker`. No worker holds pages of an unknown model.

    load: names that are new to the client are looked up in the list of workers after the query, for at most 0.5 s, and
    unknown ones are logged. That changes no answer. tier_weights: default to 1, 0.75, 0.5 and 0.25.
    """
    prompt = Prompt(model, token_ids, None, None, lora_name, cache_salt, is_eagle, tenant, tier_weights)
    return _choosing(prompt, load, lambda ranked: next(iter(ranked), None))


def rank_workers(
    model: str,
    token_ids: Integers,
    *,
    load: Mapping[str, float] | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
    tenant: str | None = None,
    tier_weights: TierWeights | None = None,
) -> Call[list[WorkerChoice]]:
    """Query, and return all candidates by the rule of `best_worker`, the best one first. Arguments as there."""
    prompt = Prompt(model, token_ids, None, None, lora_name, cache_salt, is_eagle, tenant, tier_weights)
    return _choosing(prompt, load, lambda ranked: ranked)


def _choosing(prompt: Prompt, load: Mapping[str, float] | None, choose: Callable[[list[WorkerChoice]], T]) -> Call[T]:
    if load is not None:
        check_load(load)
    if prompt.tier_weights is None:
        prompt = replace(prompt, tier_weights=DEFAULT_TIER_WEIGHTS)

    def unknown_model(refusal: KvsightHttpError) -> T:
        if refusal.kind != _UNKNOWN_MODEL:
            raise refusal
        return choose(ranked(NO_WORKER, load))

    call = _query(prompt.body(), _MSGPACK, lambda data: choose(ranked(decode(PeerAnswer, data), load)))
    return replace(call, refused=unknown_model, candidates=frozenset(load or ()))


def _query(body: Mapping[str, Any], content_type: str, read: Callable[[bytes], T]) -> Call[T]:
    return _post("/query_by_hash" if _BY_HASH & body.keys() else "/query", read, body, content_type)


def _post(
    path: str, read: Callable[[bytes], T], body: object, content_type: str = _MSGPACK, *, may_repeat: bool = True
) -> Call[T]:
    content = msgspec.msgpack.encode(body) if content_type == _MSGPACK else msgspec.json.encode(body)
    return Call("POST", path, read, content=content, content_type=content_type, may_repeat=may_repeat)


# --- decisions ------------------------------------------------------------------------------------------------------


def report_decisions(records: Decision | Outcome | Sequence[Decision | Outcome]) -> Call[DecisionsAccepted]:
    """Report what was chosen for requests, and what the engines reused, for `kvsight audit`. At most 1024 records.

    The service only queues the records. Call it when the request is done or in the background: a report that is lost
    costs nothing but itself.
    """
    several = [records] if isinstance(records, Decision | Outcome) else records
    return _post("/decisions", partial(decode, DecisionsAccepted), {"decisions": [each.body() for each in several]})


# --- selections -------------------------------------------------------------------------------------------------------


def select(
    model: str,
    token_ids: Integers | None = None,
    *,
    tenant: str | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    workers: Sequence[str] | None = None,
    session: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> Call[Selection]:
    """Choose a worker for a prompt, and book nothing.

    token_ids: of the prompt. None: `more` has the prompt in another form, such as `messages`. workers: the only
    candidates. session: key of the conversation. more: further fields of POST /select, such as `explain`.
    """
    fields = {
        "model_name": model,
        "routing_group": tenant,
        "lora_name": lora_name,
        "cache_salt": cache_salt,
        "allowed_worker_ids": [workers] if isinstance(workers, str) else workers and list(workers),
        "session_id": session,
        "token_ids": None if token_ids is None else token_array(token_ids).tolist(),
        **(more or {}),
    }
    return _post("/select", partial(decode, Selection), given(fields), _JSON)


def reserve(
    model: str,
    token_ids: Integers | None = None,
    *,
    tenant: str | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    workers: Sequence[str] | None = None,
    session: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> Call[Selection]:
    """Choose a worker for a prompt and book the request, until `release`. Arguments as for `select`.

    The `selection_id` of the answer names the reservation.
    """
    prompt = {"tenant": tenant, "lora_name": lora_name, "cache_salt": cache_salt}
    call = select(model, token_ids, workers=workers, session=session, more=more, **prompt)
    return replace(call, path="/select_and_reserve", may_repeat=False)


def complete(selection_id: str) -> Call[None]:
    """Note that the prefill of a reserved request is complete: its first token has come."""
    return Call("POST", f"/reservations/{quote(selection_id, '')}/prefill_complete", nothing)


def release(selection_id: str) -> Call[None]:
    """Release the reservation of a request that has ended."""
    return Call("DELETE", f"/reservations/{quote(selection_id, '')}", nothing, may_repeat=False)


def book(selection: Selection) -> Call[None]:
    """Book a request on a worker that the caller chose: a selection whose id and worker were replaced."""
    fields = {name: getattr(selection, name) for name in _BOOKED}
    body = {name: value for name, value in fields.items() if value is not UNSET}
    return _post("/reservations", nothing, body, _JSON, may_repeat=False)


def loads(model: str | None = None, tenant: str | None = None) -> Call[list[ModelLoads]]:
    """What is booked on each rank, by model."""
    params = {"model_name": model, "routing_group": tenant}
    return Call("GET", "/loads", partial(decode, list[ModelLoads]), params)


# --- explanations ---------------------------------------------------------------------------------------------------


def explain(prompt: Prompt, *, worker: str | None = None, at: float | None = None) -> Call[Explanation]:
    """Why each worker holds no more of a prompt, from the log that the service keeps (`kvsight serve --record`).

    worker: the only one to explain. at: the moment in seconds since 1970; None: now. The service reads its whole log,
    which takes seconds: use a client with a longer timeout.
    """
    body = prompt.body() | given({"worker": worker, "at": at})
    return _post("/explain", partial(decode, Explanation), body, may_repeat=False)


# --- workers --------------------------------------------------------------------------------------------------------


def workers(model: str | None = None, tenant: str | None = None) -> Call[list[Worker]]:
    """All workers with the state of their views."""
    return Call("GET", "/workers", partial(decode, list[Worker]), {"model_name": model, "routing_group": tenant})


def fleet(contains: str = "", *, limit: int = 200) -> Call[Fleet]:
    """Whether the views are true, and the workers with their rates, those in trouble first.

    contains: text in the names of the workers; "" selects all. limit: the most workers of the answer.
    """
    return Call("GET", "/fleet", partial(decode, Fleet), {"contains": contains or None, "limit": limit})


def view(
    worker: str,
    *,
    dp_rank: int | None = None,
    model: str | None = None,
    tenant: str | None = None,
    limit: int = 1000,
    cursor: int = 0,
) -> Call[RadixView]:
    """Up to `limit` pages of a worker stream. cursor: `next_cursor` of the previous part."""
    params = {"dp_rank": dp_rank, "model": model, "tenant": tenant, "limit": limit, "cursor": cursor}
    return Call("GET", f"/workers/{quote(worker, '')}/view", partial(decode, RadixView), params)


def resync(
    worker: str, *, dp_rank: int | None = None, model: str | None = None, tenant: str | None = None
) -> Call[list[str]]:
    """Request a resync from the publishers of a worker. Returns the keys of the streams that will be asked."""
    params = {"dp_rank": dp_rank, "model": model, "tenant": tenant}
    return Call(
        "POST", f"/workers/{quote(worker, '')}/resync", lambda data: decode(ResyncAccepted, data).streams, params
    )


def dump() -> Call[dict[str, Any]]:
    """The contents of all views, in Dynamo's format. The answer can be large."""
    return Call("GET", "/dump", partial(decode, dict[str, Any]))


def register(
    instance_id: str | int,
    endpoint: str,
    model: str,
    block_size: int | None = None,
    *,
    dp_rank: int = 0,
    replay_endpoint: str | None = None,
    tenant: str | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    more: Mapping[str, object] | None = None,
) -> Call[None]:
    """Let the service read an engine's ZMQ events. endpoint: such as tcp://HOST:5557.

    block_size: None to learn it from the events. lora_name, cache_salt: defaults for pages whose events contain none.
    more: further fields of POST /register, such as `eagle`. A service that reads a log refuses with 404.
    """
    fields = {
        "instance_id": instance_id,
        "endpoint": endpoint,
        "block_size": block_size,
        "dp_rank": dp_rank,
        "replay_endpoint": replay_endpoint,
        **(more or {}),
    }
    if lora_name or cache_salt:  # only the RFC's dialect has these
        names = {"modelname": model, "tenant_id": tenant, "lora_name": lora_name, "additionalsalt": cache_salt}
    else:
        names = {"model_name": model, "routing_group": tenant}
    return _registration("/register", {**fields, **names})


def unregister(
    instance_id: str | int, model: str, *, dp_rank: int | None = None, tenant: str | None = None
) -> Call[None]:
    """Undo `register`, for one rank or for all."""
    fields = {"instance_id": instance_id, "model_name": model, "dp_rank": dp_rank, "routing_group": tenant}
    return _registration("/unregister", fields)


def _registration(path: str, fields: Mapping[str, object]) -> Call[None]:
    """The body is JSON, which Dynamo's indexer accepts, too."""
    return _post(path, nothing, given(fields), _JSON, may_repeat=False)


def events() -> Call[None]:
    """The refusal of an event stream, as an error. The clients read the stream itself."""
    return Call("GET", "/events", nothing, may_repeat=False)


# --- the service ----------------------------------------------------------------------------------------------------


def health() -> Call[bool]:
    """Whether the service is healthy."""
    return _probe("/health")


def ready() -> Call[bool]:
    """Whether the service has caught up with its log."""
    return _probe("/ready")


def _probe(path: str) -> Call[bool]:
    """A 503 is an answer here, so the request is not retried."""

    def not_healthy(refusal: KvsightHttpError) -> bool:
        if refusal.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise refusal
        return False

    return Call("GET", path, lambda _data: True, may_repeat=False, refused=not_healthy)


# --- answers --------------------------------------------------------------------------------------------------------


def decode(kind: type[T], data: bytes | msgspec.Raw) -> T:
    """Decode received JSON. Raises msgspec.DecodeError and no other error, whatever the bytes are."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def _error(problem: ProblemDocument, where: str, status: int) -> KvsightHttpError:
    title, detail = problem.title or _phrase(status), problem.detail or problem.error
    return KvsightHttpError(where, status, title, detail, problem.type, problem.field or None)


def _batch_result(number: int, raw: msgspec.Raw) -> PeerAnswer | KvsightHttpError:
    problem = decode(ProblemDocument, raw)
    if problem.status:
        return _error(problem, f"/query/batch, query {number}", problem.status)
    return decode(PeerAnswer, raw)


def _refusal(where: str, status: int, content: bytes) -> KvsightHttpError:
    try:
        return _error(decode(ProblemDocument, content), where, status)
    except msgspec.DecodeError:  # the text of a proxy or a parser
        text = content[:_LONGEST_TEXT].decode(errors="replace")
        return KvsightHttpError(where, status, _phrase(status), " ".join(text.split()))


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown status"


def nothing(_data: bytes) -> None:
    """For answers whose status says everything."""
