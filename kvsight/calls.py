"""The API's calls apart from any transport: what is sent, and what an answer means. Both clients are made of these.

A function here is a method of both clients; its docstring is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, TypeAlias, TypeVar, Unpack
from urllib.parse import quote

import msgspec

from kvsight.choice import DEFAULT_TIER_WEIGHTS, NOBODY, WorkerChoice, check_load
from kvsight.choice import best_worker as choose
from kvsight.decoding import decode
from kvsight.errors import KvsightHttpError, UnexpectedAnswerError
from kvsight.prompts import Numbers, Prompt, PromptOptions
from kvsight.schemas.problems import ProblemDocument
from kvsight.schemas.queries import BatchAnswer, PeerAnswer
from kvsight.schemas.workers import RadixView, ResyncAccepted, Worker

T = TypeVar("T")
Params: TypeAlias = Mapping[str, str | int | None]

_JSON = "application/json"
_MSGPACK = "application/msgpack"
_BY_HASH = frozenset({"seq_hashes", "block_hashes", "block_hash"})
_UNKNOWN_MODEL = "urn:kvsight:problem:unknown-model"
_LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[bytes], T]
    """What a body means. Raises msgspec.DecodeError."""
    params: Params | None = None
    content: bytes | None = None
    content_type: str | None = None
    may_repeat: bool = True
    """Whether it is sent again after a broken connection or a plea to come back later."""
    refused: Callable[[KvsightHttpError], T] | None = None
    """Makes an answer out of a refusal, or raises it. None: every refusal is raised."""

    def result(self, url: str, status: int, content: bytes) -> T:
        """The answer's meaning. url: for errors. Raises KvsightHttpError, UnexpectedAnswerError."""
        where = f"{url}{self.path}"
        if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            refusal = _refusal(where, status, content)
            if self.refused is None:
                raise refusal
            return self.refused(refusal)
        try:
            return self.read(content)
        except msgspec.DecodeError as error:
            raise UnexpectedAnswerError(f"{where}: status {status}, but no answer of kvsight's: {error}") from error


# --- questions ------------------------------------------------------------------------------------------------------


def query(model: str, token_ids: Numbers, **options: Unpack[PromptOptions]) -> Call[PeerAnswer]:
    """What every worker holds of a prompt, given by its tokens."""
    return _question(Prompt(model, token_ids, **options).body(), _MSGPACK, partial(decode, PeerAnswer))


def query_by_hash(
    model: str,
    *,
    seq_hashes: Numbers | None = None,
    block_hashes: Numbers | None = None,
    **options: Unpack[PromptOptions],
) -> Call[PeerAnswer]:
    """The same by the prompt's page hashes: rolling and unsigned, or local and signed."""
    prompt = Prompt(model, seq_hashes=seq_hashes, block_hashes=block_hashes, **options)
    return _question(prompt.body(), _MSGPACK, partial(decode, PeerAnswer))


def query_batch(prompts: Sequence[Prompt]) -> Call[list[PeerAnswer | KvsightHttpError]]:
    """An answer for each prompt, in order; the error, not raised, of a prompt that was refused."""
    content = msgspec.msgpack.encode({"queries": [prompt.body() for prompt in prompts]})
    return Call("POST", "/query/batch", _batch_results, content=content, content_type=_MSGPACK)


def query_raw(body: Mapping[str, Any]) -> Call[dict[str, Any]]:
    """A question in either dialect of the API, its fields as the caller has them, and its answer as it came."""
    return _question(body, _JSON, partial(decode, dict[str, Any]))


def best_worker(
    model: str, token_ids: Numbers, *, load: Mapping[str, float] | None = None, **options: Unpack[PromptOptions]
) -> Call[WorkerChoice | None]:
    """Ask, and choose by the rule of `kvsight.best_worker`. A model that is not known yet is held by nobody.

    tier_weights: `DEFAULT_TIER_WEIGHTS` where they are not given.
    """
    check_load(load or {})
    if options.get("tier_weights") is None:
        options["tier_weights"] = DEFAULT_TIER_WEIGHTS

    def unknown(refusal: KvsightHttpError) -> WorkerChoice | None:
        if refusal.kind != _UNKNOWN_MODEL:
            raise refusal
        return choose(NOBODY, load)

    body = Prompt(model, token_ids, **options).body()
    call = _question(body, _MSGPACK, lambda data: choose(decode(PeerAnswer, data), load))
    return replace(call, refused=unknown)


def _question(body: Mapping[str, Any], content_type: str, read: Callable[[bytes], T]) -> Call[T]:
    path = "/query_by_hash" if _BY_HASH & body.keys() else "/query"
    encode = msgspec.msgpack.encode if content_type == _MSGPACK else msgspec.json.encode
    return Call("POST", path, read, content=encode(body), content_type=content_type)


# --- workers --------------------------------------------------------------------------------------------------------


def workers(model: str | None = None, tenant: str | None = None) -> Call[list[Worker]]:
    """Every worker with the state of its views."""
    return Call("GET", "/workers", partial(decode, list[Worker]), {"model_name": model, "routing_group": tenant})


def view(
    worker: str,
    *,
    dp_rank: int | None = None,
    model: str | None = None,
    tenant: str | None = None,
    limit: int = 1000,
    cursor: int = 0,
) -> Call[RadixView]:
    """Up to `limit` pages of what a worker stream holds, from the `next_cursor` of the part before on."""
    params = {"dp_rank": dp_rank, "model": model, "tenant": tenant, "limit": limit, "cursor": cursor}
    return Call("GET", f"/workers/{quote(worker, '')}/view", partial(decode, RadixView), params)


def resync(
    worker: str, *, dp_rank: int | None = None, model: str | None = None, tenant: str | None = None
) -> Call[list[str]]:
    """Have a worker's publishers name everything again. Returns the streams that will be asked."""
    params = {"dp_rank": dp_rank, "model": model, "tenant": tenant}
    return Call(
        "POST", f"/workers/{quote(worker, '')}/resync", lambda data: decode(ResyncAccepted, data).streams, params
    )


def dump() -> Call[dict[str, Any]]:
    """Everything that all views hold, in Dynamo's shape. Large."""
    return Call("GET", "/dump", partial(decode, dict[str, Any]))


def register(
    instance_id: str | int,
    endpoint: str,
    model: str,
    block_size: int,
    *,
    dp_rank: int = 0,
    replay_endpoint: str | None = None,
    tenant: str | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> Call[None]:
    """Have the API subscribe to an engine's ZMQ events, where it serves that. endpoint: such as tcp://HOST:5557.

    lora_name, cache_salt: of pages of which the engine's events name none.
    """
    fields = {
        "instance_id": instance_id,
        "endpoint": endpoint,
        "block_size": block_size,
        "dp_rank": dp_rank,
        "replay_endpoint": replay_endpoint,
    }
    if lora_name or cache_salt:  # which only the RFC's dialect has
        names = {"modelname": model, "tenant_id": tenant, "lora_name": lora_name, "additionalsalt": cache_salt}
    else:
        names = {"model_name": model, "routing_group": tenant}
    return _registration("/register", {**fields, **names})


def unregister(
    instance_id: str | int, model: str, *, dp_rank: int | None = None, tenant: str | None = None
) -> Call[None]:
    """Take `register` back, for one rank or for all."""
    fields = {"instance_id": instance_id, "model_name": model, "dp_rank": dp_rank, "routing_group": tenant}
    return _registration("/unregister", fields)


def _registration(path: str, fields: Mapping[str, object]) -> Call[None]:
    """JSON, which peers take, too."""
    content = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    return Call("POST", path, _nothing, content=content, content_type=_JSON, may_repeat=False)


def events() -> Call[None]:
    """Whether events may be listened to; the stream itself is the clients' own business."""
    return Call("GET", "/events", _nothing, may_repeat=False)


# --- the service ----------------------------------------------------------------------------------------------------


def health() -> Call[bool]:
    """Whether the process is sound."""
    return _probe("/health")


def ready() -> Call[bool]:
    """Whether it has caught up with its log."""
    return _probe("/ready")


def _probe(path: str) -> Call[bool]:
    """What is said now counts: a 503 is an answer."""

    def unwell(refusal: KvsightHttpError) -> bool:
        if refusal.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise refusal
        return False

    return Call("GET", path, lambda _data: True, may_repeat=False, refused=unwell)


# --- answers --------------------------------------------------------------------------------------------------------


def _error(problem: ProblemDocument, where: str, status: int) -> KvsightHttpError:
    title, detail = problem.title or _phrase(status), problem.detail or problem.error
    return KvsightHttpError(where, status, title, detail, problem.type, problem.field or None)


def _batch_results(data: bytes) -> list[PeerAnswer | KvsightHttpError]:
    return [_batch_result(number, raw) for number, raw in enumerate(decode(BatchAnswer, data).results)]


def _batch_result(number: int, raw: msgspec.Raw) -> PeerAnswer | KvsightHttpError:
    problem = decode(ProblemDocument, raw)
    if problem.status:
        return _error(problem, f"/query/batch, query {number}", problem.status)
    return decode(PeerAnswer, raw)


def _refusal(where: str, status: int, content: bytes) -> KvsightHttpError:
    try:
        return _error(decode(ProblemDocument, content), where, status)
    except msgspec.DecodeError:  # a proxy's words, or a parser's
        text = content[:_LONGEST_TEXT].decode(errors="replace")
        return KvsightHttpError(where, status, _phrase(status), " ".join(text.split()))


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown status"


def _nothing(_data: bytes) -> None:
    """For answers whose status says all."""
