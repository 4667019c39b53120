"""The fast path takes a query only if its answer is that of FastAPI."""

import json
from typing import Any

import msgspec

from api.access.tokens import TokenRegistry
from api.fast.fast_path import FastPath
from api.fast.heads import HeadReader
from api.service import LiveService
from api.settings import ApiSettings
from kv_events.streams import StreamId
from tests.support.log.hand_fed import HandFed

BODY = json.dumps({"model_name": "m", "token_ids": list(range(16))}).encode()


def lane_of(**settings: Any) -> FastPath:
    """Return the fast path of an application that knows one worker and is not running."""
    fed = HandFed()
    fed.consumer.namespaces.add_view(StreamId("m", "default", "w", 0), 4)
    return LiveService(fed.consumer, ApiSettings(**settings)).fast_path


def answer(fast_path: FastPath, body: bytes = BODY, path: bytes = b"/query") -> bytes | None:
    head_bytes = head(path, len(body))
    found = fast_path.heads.read(head_bytes + body)
    assert found is not None
    return fast_path.answer(found[0], head_bytes + body, found[1])


def head(path: bytes = b"/query", length: int = 1, *lines: bytes) -> bytes:
    given = [b"Host: h", b"Content-Type: application/json", b"Content-Length: %d" % length, *lines]
    return b"\r\n".join([b"POST %s HTTP/1.1" % path, *given, b"", b""])


def test_a_service_that_has_not_caught_up_answers_unless_it_must_be_ready() -> None:
    assert answer(lane_of()) is not None
    assert answer(lane_of(answer_before_ready=False)) is None


def test_the_bytes_of_a_head_decide_about_its_token() -> None:
    heads = HeadReader(["/query"], TokenRegistry(ApiSettings(api_token="right")), 2**20)
    for right in (b"Bearer right", b"bearer right"):
        assert heads.read(head(b"/query", 1, b"Authorization: " + right)) is not None
    for wrong in (b"Bearer wrong", b"Bearer Right", b"Bearer right2", b"Basic right", b"right", b""):
        assert heads.read(head(b"/query", 1, b"Authorization: " + wrong)) is None
    assert heads.read(head()) is None


def test_a_packed_body_has_a_template_when_it_comes_again() -> None:
    fast_path, packed = lane_of(), msgspec.msgpack.encode({"model_name": "m", "token_ids": bytes(64)})
    for body, content_type, is_first in ((BODY, b"json", True), (packed, b"msgpack", False)):
        data = head(length=len(body)).replace(b"json", content_type) + body
        found = fast_path.heads.read(data)
        assert found is not None
        assert [fast_path.request_template(found[0], data, found[1]) is not None for _ in range(2)] == [is_first, True]


def test_as_many_heads_and_envelopes_as_a_client_can_invent_are_read() -> None:
    fast_path = lane_of()
    for number in range(10_000):
        body = b'{"x":%d,"model_name":"m","token_ids":[1]}' % number
        assert answer(fast_path, body) is not None
