"""POST /register and /unregister, in both dialects."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import decode_as
from api.queries.large_bodies import Body, BodyFormat
from api.queries.routes import RawEndpoint, json_response
from kv_events.errors import InvalidValueError
from kv_events.http.queries import DialectFields
from kv_events.http.registrations import (
    PeerRegistered,
    PeerRegistration,
    PeerUnregistration,
    RfcRegistered,
    RfcRegistration,
    RfcUnregistered,
    RfcUnregistration,
)
from kv_events.streams import DEFAULT_TENANT

if TYPE_CHECKING:
    from api.workers.registrations import Registrations
    from bridge import EngineSettings

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024

_T = TypeVar("_T")
_ADDRESSES = ("endpoint", "replay_endpoint")
_DEVICES = ("npu", "gpu", "xpu")
"""Names of the device in `medium_endpoints`."""


class RegisterRoutes:
    """The shared part of the two routes. registrations: None if this process reads a log."""

    def __init__(self, registrations: Registrations | None) -> None:
        self._given = registrations

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        handlers = {"/register": self._register, "/unregister": self._unregister}
        return {path: RawEndpoint(handler, MAX_BODY_BYTES) for path, handler in handlers.items()}

    @property
    def _registrations(self) -> Registrations:
        if self._given is None:
            detail = (
                "this service reads a log that others write: engines that publish to it need no registration, and "
                "`kvsight bridge` publishes for those that do not"
            )
            raise ProblemError(HTTPStatus.NOT_FOUND, ProblemKind.NOT_EMBEDDED, detail)
        return self._given

    async def _register(self, body: Body, body_format: BodyFormat) -> Response:
        registrations = self._registrations
        if _is_peer(body, body_format):
            peer = decode_as(PeerRegistration, body, body_format)
            is_new = await registrations.add(engine_of_peer(peer), is_peer=True)
            return _json(PeerRegistered(), HTTPStatus.CREATED if is_new else HTTPStatus.OK)
        rfc = decode_as(RfcRegistration, body, body_format)
        await registrations.add(engine_of_rfc(rfc), is_peer=False)
        return _json(RfcRegistered(instance_id=rfc.instance_id))

    async def _unregister(self, body: Body, body_format: BodyFormat) -> Response:
        registrations = self._registrations
        if _is_peer(body, body_format):
            peer = decode_as(PeerUnregistration, body, body_format)
            tenant = peer.routing_group or None
            await registrations.remove(str(peer.instance_id), peer.model_name, tenant, peer.dp_rank)
            return _json(PeerRegistered())
        rfc = decode_as(RfcUnregistration, body, body_format)
        model = _model(rfc.model, rfc.modelname)
        removed = await registrations.remove(str(rfc.instance_id), model, rfc.tenant_id or DEFAULT_TENANT, rfc.dp_rank)
        return _json(RfcUnregistered(removed_instances=[f"{e.worker}|{e.tenant}|{e.dp_rank}" for e in removed]))


def _is_peer(body: Body, body_format: BodyFormat) -> bool:
    return decode_as(DialectFields, body, body_format).model_name is not UNSET


def engine_of_peer(request: PeerRegistration) -> EngineSettings:
    return _engine(request, request.endpoint, request.model_name, request.routing_group)


def engine_of_rfc(request: RfcRegistration) -> EngineSettings:
    return _engine(
        request,
        _endpoint(request),
        _model(request.model, request.modelname),
        request.tenant_id,
        lora_name=request.lora_name or "",
        cache_salt=request.additionalsalt or request.additional_salt or "",
    )


def _endpoint(request: RfcRegistration) -> str:
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


def _engine(
    request: PeerRegistration | RfcRegistration,
    endpoint: str,
    model: str,
    tenant: str | None,
    *,
    lora_name: str = "",
    cache_salt: str = "",
) -> EngineSettings:
    from bridge import EngineSettings  # only processes that read engines load the bridge

    try:
        return EngineSettings(
            endpoint=endpoint,
            worker=str(request.instance_id),
            model=model,
            replay_endpoint=request.replay_endpoint or None,
            tenant=tenant or DEFAULT_TENANT,
            dp_rank=request.dp_rank or 0,
            block_size=request.block_size,
            eagle=request.eagle,
            count_copies=request.count_copies,
            attention_chunk_size=request.attention_chunk_size,
            lora_name=lora_name,
            cache_salt=cache_salt,
        )
    except InvalidValueError as error:
        raise _problem(error) from None


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


def _json(answer: msgspec.Struct, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return json_response(answer, status)
