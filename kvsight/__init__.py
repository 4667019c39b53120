"""The public names, for engines and routers.

Names are imported on first use, so a router does not load what engines need, nor the other way round. Everything that a
router uses imports only `kvsight` and `kv_events`; what an engine uses also `engine_cache` and `publisher`. `cli` holds
the `kvsight` command.

Start at `client`, then `calls`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_cache import RadixCache as RadixCache
    from kv_events import AllBlocksCleared as AllBlocksCleared
    from kv_events import BlockRemoved as BlockRemoved
    from kv_events import BlockStored as BlockStored
    from kv_events import InvalidValueError as InvalidValueError
    from kv_events import KvsightError as KvsightError
    from kv_events import StorageMedium as StorageMedium
    from kv_events.hashing import sequence_hashes as sequence_hashes
    from kv_events.http.decisions import DecisionsAccepted as DecisionsAccepted
    from kv_events.http.events import BatchApplied as BatchApplied
    from kv_events.http.events import ClientDropped as ClientDropped
    from kv_events.http.events import FeedEvent as FeedEvent
    from kv_events.http.events import StateChanged as StateChanged
    from kv_events.http.explanations import BatchPosition as BatchPosition
    from kv_events.http.explanations import Evidence as Evidence
    from kv_events.http.explanations import Explanation as Explanation
    from kv_events.http.explanations import Finding as Finding
    from kv_events.http.explanations import WorkerExplanation as WorkerExplanation
    from kv_events.http.fleet import Fleet as Fleet
    from kv_events.http.fleet import FleetRank as FleetRank
    from kv_events.http.fleet import FleetWorker as FleetWorker
    from kv_events.http.fleet import StateChange as StateChange
    from kv_events.http.queries import Missing as Missing
    from kv_events.http.queries import PeerAnswer as PeerAnswer
    from kv_events.http.queries import PeerInstance as PeerInstance
    from kv_events.http.selection import Load as Load
    from kv_events.http.selection import ModelLoads as ModelLoads
    from kv_events.http.selection import Overlap as Overlap
    from kv_events.http.selection import PrefillWorker as PrefillWorker
    from kv_events.http.selection import Selection as Selection
    from kv_events.http.selection import Source as Source
    from kv_events.http.selection import WeighedCandidate as WeighedCandidate
    from kv_events.http.workers import Listener as Listener
    from kv_events.http.workers import RadixView as RadixView
    from kv_events.http.workers import ViewPage as ViewPage
    from kv_events.http.workers import Worker as Worker
    from kvsight.base_client import RetryPolicy as RetryPolicy
    from kvsight.choice import WorkerChoice as WorkerChoice
    from kvsight.choice import best_worker as best_worker
    from kvsight.choice import rank_workers as rank_workers
    from kvsight.client import AsyncClient as AsyncClient
    from kvsight.client import Client as Client
    from kvsight.errors import ClientClosedError as ClientClosedError
    from kvsight.errors import KvsightConnectionError as KvsightConnectionError
    from kvsight.errors import KvsightHttpError as KvsightHttpError
    from kvsight.errors import UnexpectedAnswerError as UnexpectedAnswerError
    from kvsight.prompts import Decision as Decision
    from kvsight.prompts import Outcome as Outcome
    from kvsight.prompts import Prompt as Prompt
    from publisher import EventPublisher as EventPublisher
    from publisher import PublisherSettings as PublisherSettings
    from publisher.sinks.file import FileSink as FileSink
    from publisher.sinks.kafka import KafkaSink as KafkaSink
    from publisher.sinks.zmq import ZmqSink as ZmqSink

_NAMES = {
    "engine_cache": "RadixCache",
    "kv_events": "AllBlocksCleared BlockRemoved BlockStored InvalidValueError KvsightError StorageMedium",
    "kv_events.hashing": "sequence_hashes",
    "kv_events.http.decisions": "DecisionsAccepted",
    "kv_events.http.events": "BatchApplied ClientDropped FeedEvent StateChanged",
    "kv_events.http.explanations": "BatchPosition Evidence Explanation Finding WorkerExplanation",
    "kv_events.http.fleet": "Fleet FleetRank FleetWorker StateChange",
    "kv_events.http.queries": "Missing PeerAnswer PeerInstance",
    "kv_events.http.selection": "Load ModelLoads Overlap PrefillWorker Selection Source WeighedCandidate",
    "kv_events.http.workers": "Listener RadixView ViewPage Worker",
    "kvsight.base_client": "RetryPolicy",
    "kvsight.choice": "WorkerChoice best_worker rank_workers",
    "kvsight.client": "AsyncClient Client",
    "kvsight.errors": "ClientClosedError KvsightConnectionError KvsightHttpError UnexpectedAnswerError",
    "kvsight.prompts": "Decision Outcome Prompt",
    "publisher": "EventPublisher PublisherSettings",
    "publisher.sinks.file": "FileSink",
    "publisher.sinks.kafka": "KafkaSink",
    "publisher.sinks.zmq": "ZmqSink",
}
"""Module -> its public names."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvsight' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
