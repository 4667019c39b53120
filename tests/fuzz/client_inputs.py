"""Inputs of a client: answers of the API and its event stream, from an untrusted server."""

import contextlib
from typing import Any

import msgspec

from kv_events.http.events import EVENT_NAMES, BatchApplied, ClientDropped, FeedEvent, StateChanged
from kvsight import KvsightHttpError, Prompt, calls
from kvsight.base_client import EventReader
from kvsight.calls import Call
from kvsight.errors import UnexpectedAnswerError

_HELD = {
    "longest_matched": 16, "gpu": 4, "dp": {"0": 4, "1": 0}, "matched_dp": {"0": 4, "1": 16}, "cpu": 16, "disk": 16,
    "external": 16, "state": "live", "age_ms": 5, "weighted": 13.0, "weighted_dp": {"0": 4.0, "1": 12.0},
}  # fmt: skip
_ANSWER = {"scores": {"w": {"0": 4}}, "frequencies": [], "instances": {"w": _HELD, "v": {**_HELD, "dp": {"7": 16}}}}
_PROBLEM = {"type": "urn:x", "title": "T", "status": 404, "detail": "no", "field": "model", "error": "no"}
_LISTENER = {
    "endpoint": "t/m/w/0", "status": "active", "state": "live", "stale_reason": "", "age_ms": 3, "epoch": 1, "seq": 2,
    "pages": {"GPU": 4}, "digest": "00", "counters": {"batches": 3},
}  # fmt: skip
_WORKER = {
    "instance_id": "w", "status": "active", "model_name": "m", "routing_group": "default", "block_size": 4,
    "listeners": {"0": _LISTENER}, "state": "live", "age_ms": 3,
}  # fmt: skip
_VIEW = {
    "model_name": "m", "routing_group": "default", "block_size": 4, "dp_rank": 0, "state": "live", "age_ms": 3,
    "epoch": 1, "seq": 2, "pages": [{"sequence_hash": 2**63, "parent": None, "media": ["GPU"]}], "next_cursor": None,
}  # fmt: skip
_BODIES: list[Any] = [_ANSWER, {"results": [_ANSWER, _PROBLEM]}, _PROBLEM, [_WORKER], _VIEW, {"streams": ["t/m/w/0"]}]
ANSWERS = [msgspec.json.encode(body) for body in _BODIES]

_CALLS: list[Call[Any]] = [
    calls.query("m", [1]),
    calls.query_batch([Prompt("m", [1])]),
    calls.query_raw({"model_name": "m", "token_ids": [1]}),
    calls.best_worker("m", [1]),
    calls.best_worker("m", [1], load={"w": 1.0, "u": 0.0}),
    calls.workers(),
    calls.view("w"),
    calls.resync("w"),
    calls.dump(),
    calls.register("w", "tcp://e:5557", "m", 4),
    calls.ready(),
]


def run_answer(data: bytes) -> None:
    """Return the bytes as the answer to every call, with various statuses."""
    for call in _CALLS:
        for status in (200, 404, 503):
            with contextlib.suppress(KvsightHttpError, UnexpectedAnswerError):
                call.result("http://t", status, data)


_STREAM: dict[str, Any] = {
    "stream": "default/m/w/0", "model_name": "m", "routing_group": "default", "instance_id": "w", "dp_rank": 0,
}  # fmt: skip
_BATCH = BatchApplied(
    **_STREAM, epoch=1, seq=2, stored={"GPU": 1}, removed={}, cleared=False, pages={"GPU": 4}, state="live"
)
_STATE = StateChanged(**_STREAM, before=None, state="stale", reason="a gap")
FEED = b": kvsight\n\n" + b"".join(
    b"event: %s\ndata: %s\n\n" % (EVENT_NAMES[type(event)], msgspec.json.encode(event))
    for event in (_STATE, _BATCH, ClientDropped(lost=7))
)


def run_feed(data: bytes) -> None:
    """Feed the bytes whole and in pieces. Both must give the same events."""
    pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
    assert _events([data]) == _events(pieces)


def _events(received: list[bytes]) -> list[FeedEvent]:
    reader = EventReader("http://t/events")
    events: list[FeedEvent] = []
    with contextlib.suppress(UnexpectedAnswerError):
        for part in received:
            for event in reader.take(part):
                events.append(event)
    return events
