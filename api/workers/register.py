"""POST /register and /unregister, in both dialects."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import Body, BodyFormat, decode_as
from api.queries.routes import RawEndpoint, json_response
from api.workers.routes import MAX_BODY_BYTES, selected_views
from indexer.views import ViewState
from kv_events.errors import InvalidValueError
from kv_events.http import registrations as wire
from kv_events.http.queries import DialectFields
from kv_events.streams import DEFAULT_TENANT, StreamId

if TYPE_CHECKING:
    from api.workers.registrations import Registrations
    from bridge import EngineSettings
    from indexer.consumer import Consumer

logger = logging.getLogger(__name__)

_ADDRESSES = ("endpoint", "replay_endpoint")
_DEVICES = ("npu", "gpu", "xpu")
"""Names of the device in `medium_endpoints`."""


class RegisterRoutes:
    """The shared part of the two routes. registrations: None if this process reads a log, with `consumer`."""

    def __init__(self, registrations: Registrations | None, consumer: Consumer) -> None:
        self._given = registrations
        self._consumer = consumer

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        handlers = {"/register": self._register, "/unregister": self._unregister}
        return {path: RawEndpoint(handler, MAX_BODY_BYTES) for path, handler in handlers.items()}

    @property
    def _registrations(self) -> Registrations:
        if self._given is None:
            raise _not_embedded(
                "engines that publish to it need no registration, and `kvsight bridge` publishes for those that do not"
            )
        return self._given

    async def _register(self, body: Body, body_format: BodyFormat) -> Response:
        registrations = self._registrations
        if _is_peer(body, body_format):
            peer = decode_as(wire.PeerRegistration, body, body_format)
            is_new = await registrations.add(engine_of(peer), is_peer=True)
            return json_response(wire.PeerRegistered(), HTTPStatus.CREATED if is_new else HTTPStatus.OK)
        rfc = decode_as(wire.RfcRegistration, body, body_format)
        await registrations.add(engine_of(rfc), is_peer=False)
        return json_response(wire.RfcRegistered(instance_id=rfc.instance_id))

    async def _unregister(self, body: Body, body_format: BodyFormat) -> Response:
        if _is_peer(body, body_format):
            peer = decode_as(wire.PeerUnregistration, body, body_format)
            tenant = peer.routing_group or None
            await self._remove(str(peer.instance_id), peer.model_name, tenant, peer.dp_rank)
            return json_response(wire.PeerRegistered())
        rfc = decode_as(wire.RfcUnregistration, body, body_format)
        model = _model(rfc.model, rfc.modelname)
        removed = await self._remove(str(rfc.instance_id), model, rfc.tenant_id or DEFAULT_TENANT, rfc.dp_rank)
        return json_response(
            wire.RfcUnregistered(removed_instances=[f"{e.worker}|{e.tenant}|{e.dp_rank}" for e in removed])
        )

    async def _remove(
        self, worker: str, model: str, tenant: str | None, dp_rank: int | None
    ) -> Sequence[EngineSettings | StreamId]:
        """Stop reading a worker, or forget an expired one of a log. Raises ProblemError."""
        if self._given is not None:
            return await self._given.remove(worker, model, tenant, dp_rank)
        views = selected_views(self._consumer, worker, dp_rank, model, tenant)
        if any(self._consumer.freshness.state(view) is not ViewState.EXPIRED for view in views):
            raise _not_embedded("a worker can be forgotten once it is expired; stop its publisher")
        await self._consumer.forget([view.stream for view in views])
        return [view.stream for view in views]


def _not_embedded(advice: str) -> ProblemError:
    detail = f"this service reads a log that others write: {advice}"
    return ProblemError(HTTPStatus.NOT_FOUND, ProblemKind.NOT_EMBEDDED, detail)


def _is_peer(body: Body, body_format: BodyFormat) -> bool:
    return decode_as(DialectFields, body, body_format).model_name is not UNSET


def engine_of(request: wire.PeerRegistration | wire.RfcRegistration) -> EngineSettings:
    """Return the engine of a registration. Raises ProblemError."""
    from bridge import EngineSettings  # only processes that read engines load the bridge

    lora_name = cache_salt = None
    if isinstance(request, wire.PeerRegistration):
        endpoint, model, tenant = request.endpoint, request.model_name, request.routing_group
    else:
        endpoint, model, tenant = _endpoint(request), _model(request.model, request.modelname), request.tenant_id
        lora_name, cache_salt = request.lora_name, request.additionalsalt or request.additional_salt
    try:
        return EngineSettings(
            endpoint=endpoint,
            model=model,
            tenant=tenant or DEFAULT_TENANT,
            lora_name=lora_name or "",
            cache_salt=cache_salt or "",
            worker=str(request.instance_id),
            replay_endpoint=request.replay_endpoint or None,
            dp_rank=request.dp_rank or 0,
            block_size=request.block_size,
            eagle=request.eagle,
            count_copies=request.count_copies,
            attention_chunk_size=request.attention_chunk_size,
            capacity=request.capacity,
            metrics_url=request.metrics_url or None,
        )
    except InvalidValueError as error:
        raise _problem(error) from None


def _endpoint(request: wire.RfcRegistration) -> str:
    """Return the address of the device's events, under which the events of all media arrive."""
    by_medium = {medium.lower(): address for medium, address in request.medium_endpoints.items() if address}
    endpoint = request.endpoint or next((by_medium[name] for name in _DEVICES if name in by_medium), None)
    if endpoint is None:
        expected = f"endpoint, or an address under {', '.join(_DEVICES)} in medium_endpoints"
        raise ProblemError(422, ProblemKind.MISSING_FIELD, f"endpoint: missing; expected {expected}", "endpoint")
    for medium, address in by_medium.items():
        if address != endpoint:
            logger.warning("instance %s: events of medium %r at %r are not read", request.instance_id, medium, address)
    return endpoint


def _problem(error: InvalidValueError) -> ProblemError:
    if error.field not in _ADDRESSES:
        return ProblemError.of_value(error)
    address = str(error.value)
    if "://" in address:
        return ProblemError.of_value(error, HTTPStatus.BAD_REQUEST, ProblemKind.INVALID_ENDPOINT)
    detail = f"invalid ZMQ endpoint `{address}`: missing scheme"
    return ProblemError(HTTPStatus.BAD_REQUEST, ProblemKind.INVALID_ENDPOINT, detail, error.field, address)


def _model(model: str | UnsetType, modelname: str | UnsetType) -> str:
    named = modelname if model is UNSET else model
    if isinstance(named, UnsetType):
        raise ProblemError(
            422, ProblemKind.MISSING_FIELD, "model_name: missing (or modelname, in the RFC's dialect)", "model_name"
        )
    return named
