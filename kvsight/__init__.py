"""The public names, for engines and routers.

Names are imported on first use, so a router does not load what engines need, nor the other way round. Everything that a
router uses imports only `kvsight` and `kv_events`; what an engine uses also `engine_cache` and `publisher`. `cli` holds
the `kvsight` command, `schemas` the answers of the API.

Start at `client`, then `calls`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_cache import RadixCache
    from kv_events import AllBlocksCleared, BlockRemoved, BlockStored, InvalidValueError, KvsightError, StorageMedium
    from kv_events.hashing import sequence_hashes
    from kv_events.http.decisions import DecisionsAccepted
    from kv_events.http.events import BatchApplied, ClientDropped, FeedEvent, StateChanged
    from kv_events.http.explanations import BatchPosition, Evidence, Explanation, Finding, WorkerExplanation
    from kv_events.http.fleet import Fleet, FleetRank, FleetWorker, StateChange
    from kv_events.http.queries import Missing, PeerAnswer, PeerInstance
    from kv_events.http.workers import Listener, RadixView, ViewPage, Worker
    from kvsight.choice import WorkerChoice, best_worker, rank_workers
    from kvsight.client import AsyncClient, Client
    from kvsight.decisions import Decision, Outcome
    from kvsight.errors import KvsightConnectionError, KvsightHttpError, UnexpectedAnswerError
    from kvsight.prompts import Prompt
    from kvsight.retrying import RetryPolicy
    from publisher import EventPublisher, PublisherSettings
    from publisher.sinks.file import FileSink
    from publisher.sinks.kafka import KafkaSink
    from publisher.sinks.zmq import ZmqSink

_HOMES = {
    "AllBlocksCleared": "kv_events",
    "AsyncClient": "kvsight.client",
    "BatchApplied": "kv_events.http.events",
    "BatchPosition": "kv_events.http.explanations",
    "BlockRemoved": "kv_events",
    "BlockStored": "kv_events",
    "Client": "kvsight.client",
    "ClientDropped": "kv_events.http.events",
    "Decision": "kvsight.decisions",
    "DecisionsAccepted": "kv_events.http.decisions",
    "EventPublisher": "publisher",
    "Evidence": "kv_events.http.explanations",
    "Explanation": "kv_events.http.explanations",
    "FeedEvent": "kv_events.http.events",
    "FileSink": "publisher.sinks.file",
    "Finding": "kv_events.http.explanations",
    "Fleet": "kv_events.http.fleet",
    "FleetRank": "kv_events.http.fleet",
    "FleetWorker": "kv_events.http.fleet",
    "InvalidValueError": "kv_events",
    "KafkaSink": "publisher.sinks.kafka",
    "KvsightConnectionError": "kvsight.errors",
    "KvsightError": "kv_events",
    "KvsightHttpError": "kvsight.errors",
    "Listener": "kv_events.http.workers",
    "Outcome": "kvsight.decisions",
    "Missing": "kv_events.http.queries",
    "PeerAnswer": "kv_events.http.queries",
    "PeerInstance": "kv_events.http.queries",
    "Prompt": "kvsight.prompts",
    "PublisherSettings": "publisher",
    "RadixCache": "engine_cache",
    "RadixView": "kv_events.http.workers",
    "RetryPolicy": "kvsight.retrying",
    "StateChange": "kv_events.http.fleet",
    "StateChanged": "kv_events.http.events",
    "StorageMedium": "kv_events",
    "UnexpectedAnswerError": "kvsight.errors",
    "ViewPage": "kv_events.http.workers",
    "Worker": "kv_events.http.workers",
    "WorkerChoice": "kvsight.choice",
    "WorkerExplanation": "kv_events.http.explanations",
    "ZmqSink": "publisher.sinks.zmq",
    "best_worker": "kvsight.choice",
    "rank_workers": "kvsight.choice",
    "sequence_hashes": "kv_events.hashing",
}

__all__ = [
    "AllBlocksCleared",
    "AsyncClient",
    "BatchApplied",
    "BatchPosition",
    "BlockRemoved",
    "BlockStored",
    "Client",
    "ClientDropped",
    "Decision",
    "DecisionsAccepted",
    "EventPublisher",
    "Evidence",
    "Explanation",
    "FeedEvent",
    "FileSink",
    "Finding",
    "Fleet",
    "FleetRank",
    "FleetWorker",
    "InvalidValueError",
    "KafkaSink",
    "KvsightConnectionError",
    "KvsightError",
    "KvsightHttpError",
    "Listener",
    "Missing",
    "Outcome",
    "PeerAnswer",
    "PeerInstance",
    "Prompt",
    "PublisherSettings",
    "RadixCache",
    "RadixView",
    "RetryPolicy",
    "StateChange",
    "StateChanged",
    "StorageMedium",
    "UnexpectedAnswerError",
    "ViewPage",
    "Worker",
    "WorkerChoice",
    "WorkerExplanation",
    "ZmqSink",
    "best_worker",
    "rank_workers",
    "sequence_hashes",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvsight' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
