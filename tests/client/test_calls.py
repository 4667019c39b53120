"""What each call sends."""

from typing import Any

import msgspec
import pytest

from api.queries.body_formats import decode_as, format_of
from api.workers.register import engine_of
from kv_events.errors import InvalidValueError
from kv_events.http.registrations import RfcRegistration
from kvsight import AsyncClient, Client, Decision, Outcome, Prompt, calls
from kvsight.calls import Call

JSON, MSGPACK = "application/json", "application/msgpack"
SENT: list[tuple[Call[Any], str, str, dict[str, Any]]] = [
    (
        calls.query("m", [1, 2**32 - 1], lora_name="ad", cache_salt=None, tier_weights={"gpu": 1.0}),
        "/query",
        MSGPACK,
        {"model_name": "m", "token_ids": b"\1\0\0\0\xff\xff\xff\xff", "lora_name": "ad", "tier_weights": {"gpu": 1.0}},
    ),
    (
        calls.query_by_hash("m", block_hashes=[1]),
        "/query_by_hash",
        MSGPACK,
        {"model_name": "m", "block_hashes": b"\1" + b"\0" * 7},
    ),
    *(
        (calls.query_raw({"model": "m", field: [1]}), path, JSON, {"model": "m", field: [1]})
        for field, path in [("token_ids", "/query"), ("seq_hashes", "/query_by_hash"), ("block_hash", "/query_by_hash")]
    ),
    (
        calls.register(7, "tcp://e:5557", "m", 16, dp_rank=1, replay_endpoint="tcp://e:6557", tenant="t", lora_name=""),
        "/register",
        JSON,
        {
            "instance_id": 7,
            "endpoint": "tcp://e:5557",
            "model_name": "m",
            "block_size": 16,
            "dp_rank": 1,
            "replay_endpoint": "tcp://e:6557",
            "routing_group": "t",
        },
    ),
    (calls.unregister("w", "m"), "/unregister", JSON, {"instance_id": "w", "model_name": "m"}),
]


@pytest.mark.parametrize(("call", "path", "content_type", "body"), SENT)
def test_a_call_sends_its_fields_packed_or_in_the_peers_dialect(
    call: Call[Any], path: str, content_type: str, body: dict[str, Any]
) -> None:
    assert (call.method, call.path, call.content_type) == ("POST", path, content_type)
    decode = msgspec.msgpack.decode if content_type == MSGPACK else msgspec.json.decode
    assert decode(call.content or b"") == body


def test_hashes_travel_as_eight_bytes_each() -> None:
    assert Prompt("m", seq_hashes=[1, 2**64 - 1]).body()["seq_hashes"] == b"\1" + b"\0" * 7 + b"\xff" * 8
    assert Prompt("m", block_hashes=[1, -1]).body()["block_hashes"] == b"\1" + b"\0" * 7 + b"\xff" * 8


def test_the_adapter_and_the_salt_of_an_engine_are_registered_in_the_dialect_that_knows_them() -> None:
    call = calls.register(7, "tcp://e:5557", "m", 16, tenant="t", lora_name="ad", cache_salt="x")
    engine = engine_of(decode_as(RfcRegistration, call.content or b"", format_of(JSON)))
    assert (engine.worker, engine.model, engine.tenant, engine.block_size) == ("7", "m", "t", 16)
    assert (call.path, engine.lora_name, engine.cache_salt) == ("/register", "ad", "x")


def test_a_load_that_is_no_number_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(InvalidValueError, match=r"load\['a'\]: got nan"):
        calls.best_worker("m", [1], load={"a": float("nan")})


PROMPT = Prompt("m", [1])


@pytest.mark.parametrize(
    ("method", "arguments", "named"),
    [
        ("query", {"model": "m", "token_ids": [1], "lora_name": object()}, "lora_name"),
        ("query_batch", {"prompts": [PROMPT, 5]}, "prompts"),
        ("query_batch", {"prompts": PROMPT}, "prompts"),
        ("query_raw", {"body": ["token_ids"]}, "body"),
        ("select", {"model": "m", "workers": 5}, "workers"),
        ("reserve", {"model": "m", "more": 5}, "more"),
        ("release", {"selection_id": None}, "selection_id"),
        ("report_decisions", {"records": [Outcome("r", 1), 5]}, "records"),
        ("report_decisions", {"records": Decision("r", PROMPT, "w", candidates=5)}, "records"),  # type: ignore[arg-type]
        ("explain", {"prompt": {"model": "m", "token_ids": [1]}}, "prompt"),
        ("view", {"worker": 5}, "worker"),
        ("register", {"instance_id": 1.5j, "endpoint": "tcp://e:5557", "model": "m"}, "instance_id"),
    ],
)
async def test_an_argument_of_a_wrong_type_is_named(method: str, arguments: dict[str, Any], named: str) -> None:
    with Client() as client, pytest.raises(InvalidValueError, match=f"^{named}: got .*, expected ") as refusal:
        getattr(client, method)(**arguments)
    assert refusal.value.value is arguments[named]
    async with AsyncClient() as asynchronous:
        with pytest.raises(InvalidValueError, match=f"^{named}: got .*, expected "):
            await getattr(asynchronous, method)(**arguments)


def test_an_unknown_argument_is_an_error_of_the_call() -> None:
    with Client() as client, pytest.raises(TypeError, match="unexpected keyword argument 'salt'"):
        client.query("m", [1], salt="x")  # type: ignore[call-arg]
