"""The bytes that each call sends."""

from __future__ import annotations

import msgspec
import pytest

from api.queries.body_formats import decode_as, format_of
from api.workers.register import engine_of
from kv_events.errors import InvalidValueError
from kv_events.http.registrations import RfcRegistration
from kvsight import Prompt, calls


def test_a_prompt_travels_packed() -> None:
    call = calls.query("m", [1, 2**32 - 1], lora_name="ad", cache_salt=None, tier_weights={"gpu": 1.0})
    assert (call.method, call.path, call.content_type) == ("POST", "/query", "application/msgpack")
    assert call.content is not None
    assert msgspec.msgpack.decode(call.content) == {
        "model_name": "m",
        "token_ids": b"\1\0\0\0\xff\xff\xff\xff",
        "lora_name": "ad",
        "tier_weights": {"gpu": 1.0},
    }


def test_hashes_travel_as_eight_bytes_each() -> None:
    assert Prompt("m", seq_hashes=[1, 2**64 - 1]).body()["seq_hashes"] == b"\1" + b"\0" * 7 + b"\xff" * 8
    assert Prompt("m", block_hashes=[1, -1]).body()["block_hashes"] == b"\1" + b"\0" * 7 + b"\xff" * 8
    assert calls.query_by_hash("m", block_hashes=[1]).path == "/query_by_hash"


@pytest.mark.parametrize(
    ("field", "path"),
    [("token_ids", "/query"), ("seq_hashes", "/query_by_hash"), ("block_hash", "/query_by_hash")],
)
def test_a_question_finds_its_route_by_its_fields(field: str, path: str) -> None:
    call = calls.query_raw({"model": "m", "block_size": 4, field: [1]})
    assert (call.path, call.content_type) == (path, "application/json")


def test_engines_are_registered_in_the_peers_dialect() -> None:
    call = calls.register(7, "tcp://e:5557", "m", 16, dp_rank=1, replay_endpoint="tcp://e:6557", tenant="t")
    assert (call.method, call.path, call.content_type) == ("POST", "/register", "application/json")
    assert msgspec.json.decode(call.content or b"") == {
        "instance_id": 7,
        "endpoint": "tcp://e:5557",
        "model_name": "m",
        "block_size": 16,
        "dp_rank": 1,
        "replay_endpoint": "tcp://e:6557",
        "routing_group": "t",
    }
    assert "lora_name" not in msgspec.json.decode(
        calls.register(7, "tcp://e:5557", "m", 16, lora_name="").content or b""
    )
    gone = calls.unregister("w", "m")
    assert msgspec.json.decode(gone.content or b"") == {"instance_id": "w", "model_name": "m"}
    assert gone.path == "/unregister"


def test_the_adapter_and_the_salt_of_an_engine_are_registered_in_the_dialect_that_knows_them() -> None:
    call = calls.register(7, "tcp://e:5557", "m", 16, tenant="t", lora_name="ad", cache_salt="x")
    assert (call.method, call.path, call.content_type) == ("POST", "/register", "application/json")
    request = decode_as(RfcRegistration, call.content or b"", format_of("application/json"))
    engine = engine_of(request)
    assert (engine.worker, engine.model, engine.tenant) == ("7", "m", "t")
    assert (engine.lora_name, engine.cache_salt, engine.block_size) == ("ad", "x", 16)


def test_a_load_that_is_no_number_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(InvalidValueError, match=r"load\['a'\]: got nan"):
        calls.best_worker("m", [1], load={"a": float("nan")})
