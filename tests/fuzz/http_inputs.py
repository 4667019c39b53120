"""Inputs of the service: HTTP requests and saved registrations."""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from api.decisions.routes import DecisionRoute
from api.fast.local_answers import LocalAnswers
from api.problems import ProblemError
from api.queries.body_formats import CONTENT_TYPES, decode_as, format_of
from api.queries.routes import QueryRoutes
from api.workers.register import engine_of
from api.workers.registrations import SavedRegistrations
from indexer.slices import run_at_once
from indexer.snapshots.base import Piece
from indexer.writing.queue import WriteQueue
from kv_events.decisions import VERSION, Candidate, Decision, Outcome, decode_decision, encode_decision
from kv_events.errors import RecordRejectedError
from kv_events.http.registrations import PeerRegistration, PeerUnregistration, RfcRegistration, RfcUnregistration
from tests.fuzz.log_inputs import SMALL
from tests.rigs.both_ways import BothWays
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored


def _both(values: Sequence[Any]) -> list[bytes]:
    return [codec.encode(value) for value in values for codec in (msgspec.json, msgspec.msgpack)]


_QUERIES: list[dict[str, Any]] = [
    {"model_name": "m", "token_ids": list(range(1, 17)), "lora_name": "a", "tier_weights": [1, 0.5, 0, 0]},
    {"model": "m", "block_size": 4, "seq_hashes": [1, 2**64 - 1], "instance_id": 5, "tenant_id": "default"},
    {"model": "m", "block_size": 4, "token_ids": [1, 2, 3, 4], "hit_detail": True},
    {"modelname": "m", "block_size": 4, "block_hashes": [-1, 2**63 - 1], "tier_weights": {"gpu": 1}},
    {"queries": [{"model_name": "m", "token_ids": [1, 2, 3, 4]}, {"model": "m"}]},
]
_DECISIONS: list[dict[str, Any]] = [
    {"request_id": "r", "model_name": "m", "token_ids": [1, 2, 3, 4], "worker": "w", "predicted_tokens": 4,
     "candidates": [{"worker": "w", "dp_rank": 0, "tokens": 4, "score": 0.5}], "timestamp": 1e9},
    {"decisions": [{"request_id": "r", "cached_tokens": 4}, {"request_id": "s", "model": "m", "block_size": 4,
                                                            "seq_hashes": [1, 2], "worker": "w", "dp_rank": 1}]},
]  # fmt: skip
_REGISTRATIONS: list[dict[str, Any]] = [
    {"instance_id": 1, "endpoint": "tcp://h:1", "model_name": "m", "block_size": 4, "replay_endpoint": "tcp://[::1]:2"},
    {"instance_id": "a", "type": "vLLM", "endpoint": "ipc:///x", "modelname": "m", "block_size": 4, "dp_rank": 3},
    {"instance_id": "a", "medium_endpoints": {"npu": "tcp://h:1", "cpu": ""}, "modelname": "m", "block_size": 4},
]
_LISTS = [{"engines": [{"endpoint": "tcp://h:1", "worker": "w", "model": "m"}]}]
QUERIES = _both(_QUERIES)
DECISIONS = _both(_DECISIONS)
REGISTRATIONS = [*_both(_REGISTRATIONS), *(msgspec.json.encode(kept) for kept in _LISTS)]


class HttpTarget:
    """The query routes and that of decisions as ASGI applications, without a server."""

    def __init__(self) -> None:
        consumer = HandFed(SMALL).consumer
        run_at_once(consumer.applier.apply(Stream("w").batch(stored((0, [1, 2, 3]))), 1.0))
        decisions = DecisionRoute(consumer, WriteQueue(None))
        self._routes = QueryRoutes(LocalAnswers(consumer), lambda: None, 2**20).endpoints() | decisions.endpoints()

    def __call__(self, data: bytes) -> None:
        for route in self._routes.values():
            for content_type in ("application/json", "application/msgpack"):
                asyncio.run(self._post(route, content_type, data))

    async def _post(self, route: Any, content_type: str, data: bytes) -> None:
        statuses = []

        async def receive() -> Any:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope = {"type": "http", "headers": [(b"content-type", content_type.encode())]}
        await route(scope, receive, send)
        assert max(statuses) < 500, statuses


class LaneTarget:
    """The fast path: it answers as FastAPI does."""

    def __init__(self) -> None:
        self._both = BothWays(HandFed(SMALL))

    def __call__(self, data: bytes) -> None:
        for path in ("/query", "/query_by_hash"):
            for content_type in CONTENT_TYPES:
                self._both.agree(data, path, content_type)


class _OneImage:
    """A snapshot store that holds these bytes."""

    def __init__(self, image: bytes) -> None:
        self._image = image

    async def save(self, pieces: Iterable[Piece]) -> None:
        self._image = b"".join(pieces)

    async def load(self) -> bytes:
        return self._image

    async def close(self) -> None:
        pass


def decision_records() -> list[bytes]:
    """Records of the topic of decisions."""
    decided = Decision(VERSION, "r", 1.0, "m", "t", 4, 9, bytes(16), "w", None, 8, (Candidate("w", 0, 8, 0.5),))
    return [encode_decision(each) for each in (decided, Outcome(VERSION, "r", 2.0, 8))]


def run_decision(data: bytes) -> None:
    """Decode a record of the topic of decisions."""
    with contextlib.suppress(RecordRejectedError):
        decode_decision(data)


def run_registration(data: bytes) -> None:
    """Use the bytes as a saved list and as the body of every registration request."""
    asyncio.run(SavedRegistrations(_OneImage(data)).load())
    for content_type in CONTENT_TYPES:
        codec = format_of(content_type)
        for kind in (PeerRegistration, RfcRegistration, PeerUnregistration, RfcUnregistration):
            with contextlib.suppress(ProblemError):
                request = decode_as(kind, data, codec)
                if isinstance(request, PeerRegistration | RfcRegistration):
                    engine_of(request)
