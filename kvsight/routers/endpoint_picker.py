"""The endpoint picker of the Gateway API Inference Extension: Envoy asks over gRPC where each HTTP request goes.

Envoy sends the parts of a request and of its response (mode FULL_DUPLEX_STREAMED) and gets them back unchanged, the
request with its endpoints as a header and as metadata.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from kvsight.errors import KvsightHttpError
from kvsight.routers.placement import KnownWorker, Placed, Placement, body_of

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
ENDPOINT = "x-gateway-destination-endpoint"
"""The header of a request, and the metadata of `envoy.lb`, that name its endpoints."""
_SUBSET = "envoy.lb.subset_hint", f"{ENDPOINT}-subset"
_SERVED = "envoy.lb", f"{ENDPOINT}-served"
MAX_BODY_BYTES, MAX_HELD_BYTES = 8 * 2**20, 256 * 2**20
"""Of one body, as kvsight takes it, and of all that wait for an endpoint. Further bodies get endpoints in turn."""
_MOST_ENDPOINTS = 3
_OVERWRITE = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_RESPONSE_HEADERS = wire.ProcessingResponse(response_headers=wire.HeadersResponse())
_REQUEST_TRAILERS = wire.ProcessingResponse(request_trailers=wire.TrailersResponse())
_RESPONSE_TRAILERS = wire.ProcessingResponse(response_trailers=wire.TrailersResponse())


@dataclass(frozen=True, slots=True)
class _Picked:
    endpoints: Sequence[str] = ()
    """`ip:port`, the best one first. Empty: Envoy chooses."""
    placed: Placed | None = None


class EndpointPicker:
    """Chooses endpoints, with kvsight and, without it, in turn."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._turn = count()
        self._known: Mapping[str, KnownWorker] = {}
        self._workers: Mapping[str, str] = {}  # by address

    async def pick(self, body: bytes | None, subset: Sequence[str] | None) -> _Picked:
        """Choose endpoints for a request, and book it.

        body: of OpenAI's or Anthropic's API. None: unknown. subset: the only candidates. None: all workers.
        Raises KvsightHttpError (429), see `Placement.place_within_limits`.
        """
        known = await self.placement.workers()
        if known is not self._known:
            self._known = known
            self._workers = {_address(each): name for name, each in known.items()}
        workers = list(known) if subset is None else [self._workers[each] for each in subset if each in self._workers]
        fields = None if body is None else body_of(body)
        placed = None if fields is None else await self.placement.place_within_limits(fields, workers)
        if placed is not None:
            return _Picked([_address(known[each]) for each in placed.workers[:_MOST_ENDPOINTS]], placed)
        first = next(self._turn) % len(subset) if subset else 0
        return _Picked([*subset[first:], *subset[:first]][:_MOST_ENDPOINTS] if subset else [])

    def served(self, picked: _Picked, endpoint: str) -> _Picked:
        """Note which endpoint answers. If it is another one, the booking moves there."""
        if picked.placed is None or endpoint == picked.endpoints[0]:
            return picked
        if (worker := self._workers.get(endpoint)) is not None:
            return _Picked([endpoint], self.placement.move(picked.placed, worker))
        self.placement.release(picked.placed.selection_id)
        return _Picked([endpoint])


def _address(worker: KnownWorker) -> str:
    """Return `ip:port`."""
    return worker.url.partition("://")[2].partition("/")[0]


async def _process(
    picker: EndpointPicker, messages: AsyncIterator[wire.ProcessingRequest], _context: object
) -> AsyncIterator[wire.ProcessingResponse]:
    """Answer the messages about one HTTP request, and end its booking when Envoy ends it, for whatever reason."""
    exchange = _Exchange(picker)
    try:
        async for message in messages:
            for answer in await exchange.take(message):
                yield answer
    finally:
        exchange.end()


class _Exchange:
    """One HTTP request and its response."""

    held_bytes = 0  # of all that wait

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker
        self._subset: Sequence[str] | None = None
        self._body: list[wire.HttpBody] | None = []  # None: its endpoint is chosen
        self._num_bytes = 0
        self._picked = _Picked()
        self._is_streamed = False  # the response, and its first token has not come

    async def take(self, message: wire.ProcessingRequest) -> Sequence[wire.ProcessingResponse]:
        """Return what Envoy gets for a message: nothing while a body is incomplete."""
        match message.WhichOneof("request"):
            case "request_headers":
                self._subset = _subset(message)
                return await self._choose(is_whole=False) if message.request_headers.end_of_stream else ()
            case "request_body":
                return await self._take_body(message.request_body)
            case "request_trailers":
                chosen = () if self._body is None else await self._choose(is_whole=True)
                return *chosen, _REQUEST_TRAILERS
            case "response_headers":
                self._begin_response(message)
                return (_RESPONSE_HEADERS,)
            case "response_body":
                self._follow_response(message.response_body)
                return (wire.ProcessingResponse(response_body=_unchanged(message.response_body)),)
            case "response_trailers":
                self.end()
                return (_RESPONSE_TRAILERS,)
        return ()

    def end(self) -> None:
        """Note that the request has ended. Idempotent."""
        self._let_go()
        if self._picked.placed is not None:
            self._picker.placement.release(self._picked.placed.selection_id)
            self._picked = _Picked()

    async def _take_body(self, part: wire.HttpBody) -> Sequence[wire.ProcessingResponse]:
        if self._body is None:
            return (wire.ProcessingResponse(request_body=_unchanged(part)),)
        self._body.append(part)
        self._num_bytes += len(part.body)
        _Exchange.held_bytes += len(part.body)
        is_too_large = self._num_bytes > MAX_BODY_BYTES or _Exchange.held_bytes > MAX_HELD_BYTES
        if part.end_of_stream or is_too_large:
            return await self._choose(is_whole=not is_too_large)
        return ()

    async def _choose(self, *, is_whole: bool) -> Sequence[wire.ProcessingResponse]:
        """Choose endpoints, and return the held parts of the request with them. is_whole: the body is here."""
        if self._subset == []:
            return (_refusal(503, "no endpoint is ready for this request"),)
        parts = self._body or []
        body = b"".join(part.body for part in parts) if is_whole else None
        try:
            self._picked = await self._picker.pick(body, self._subset)
        except KvsightHttpError as error:
            return (_refusal(429, error.title),)
        self._let_go()
        unchanged = (wire.ProcessingResponse(request_body=_unchanged(part)) for part in parts)
        return _to(",".join(self._picked.endpoints)), *unchanged

    def _let_go(self) -> None:
        if self._body is not None:
            _Exchange.held_bytes -= self._num_bytes
            self._body = None

    def _begin_response(self, message: wire.ProcessingRequest) -> None:
        headers = {header.key: header.raw_value for header in message.response_headers.headers.headers}
        self._is_streamed = not headers.get("content-type", b"").startswith(b"application/json")
        if served := _served(message):
            self._picked = self._picker.served(self._picked, served)
        if message.response_headers.end_of_stream:
            self.end()

    def _follow_response(self, part: wire.HttpBody) -> None:
        if part.end_of_stream:
            self.end()
        elif self._is_streamed and part.body:
            self._is_streamed = False
            if self._picked.placed is not None:
                self._picker.placement.complete(self._picked.placed.selection_id)


@asynccontextmanager
async def serving(
    placement: Placement, address: str, certificate: tuple[Path, Path] | None = None
) -> AsyncIterator[int]:
    """Serve inside the block, and close the placement at its end. Yields the port.

    certificate: files of the certificate and its key, for TLS.
    Raises OSError if the address cannot be used, or a file cannot be read.
    """
    state = health.HealthServicer()
    process = grpc.stream_stream_rpc_method_handler(
        partial(_process, EndpointPicker(placement)),
        request_deserializer=wire.ProcessingRequest.FromString,
        response_serializer=wire.ProcessingResponse.SerializeToString,
    )
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_BODY_BYTES)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Process": process})])
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    port = _bind(server, address, certificate)
    await state.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    try:
        await server.start()
        yield port
    finally:
        await state.enter_graceful_shutdown()
        await server.stop(5.0)
        await placement.aclose()


def _bind(server: Any, address: str, certificate: tuple[Path, Path] | None) -> int:
    try:
        if certificate is None:
            return int(server.add_insecure_port(address))
        chain, key = (path.read_bytes() for path in certificate)
        return int(server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)])))
    except RuntimeError as error:
        raise OSError(f"{address} cannot be used: {error}") from error


def _subset(message: wire.ProcessingRequest) -> list[str] | None:
    """Return the only candidates. None: there is no such list."""
    value = _metadata(message, *_SUBSET)
    if value is None:
        return None
    texts = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return [text.strip() for text in texts if text.strip()]


def _served(message: wire.ProcessingRequest) -> str:
    """Return the endpoint that answers. Empty: Envoy does not say it."""
    value = _metadata(message, *_SERVED)
    for each in message.attributes.values():
        value = value or each.fields.get("upstream.address")
    return "" if value is None else str(value.string_value)


def _metadata(message: wire.ProcessingRequest, namespace: str, key: str) -> Any:
    known = message.metadata_context.filter_metadata
    return known[namespace].fields.get(key) if namespace in known else None


def _to(endpoints: str) -> wire.ProcessingResponse:
    """The answer to the headers of a request. Without endpoints, it removes a header that the caller may have set."""
    metadata, mutation = Struct(), wire.HeaderMutation(remove_headers=[ENDPOINT])
    if endpoints:
        metadata.get_or_create_struct("envoy.lb")[ENDPOINT] = endpoints
        header = base_pb2.HeaderValue(key=ENDPOINT, raw_value=endpoints.encode())
        option = base_pb2.HeaderValueOption(header=header, append_action=_OVERWRITE)
        mutation = wire.HeaderMutation(set_headers=[option])
    headers = wire.HeadersResponse(response=wire.CommonResponse(header_mutation=mutation, clear_route_cache=True))
    return wire.ProcessingResponse(request_headers=headers, dynamic_metadata=metadata if endpoints else None)


def _unchanged(part: wire.HttpBody) -> wire.BodyResponse:
    same = wire.StreamedBodyResponse(body=part.body, end_of_stream=part.end_of_stream)
    return wire.BodyResponse(response=wire.CommonResponse(body_mutation=wire.BodyMutation(streamed_response=same)))


def _refusal(status: int, why: str) -> wire.ProcessingResponse:
    answer = wire.ImmediateResponse(status=HttpStatus(code=status), body=why.encode(), details=why)
    return wire.ProcessingResponse(immediate_response=answer)
