"""/register and /unregister without a server: dialects, answers and refusals. No engine is required."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from api.settings import RegistrationSettings
from api.workers.registrations import Registrations
from bridge import BridgeSettings, EngineSettings
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from kv_events.errors import InvalidValueError
from kv_events.log.memory import MemoryLog
from kv_events.schema import CLOSED
from tests.rigs.api import embedded
from tests.support.http_checks import check_problem
from tests.support.log.records import Stream, stored
from tests.support.servers.scripted_server import Reply, scripted
from tests.support.waiting import async_wait_until

ENDPOINT = "tcp://127.0.0.1:18001"
PEER = {"instance_id": 1, "endpoint": ENDPOINT, "model_name": "m", "block_size": 4}
RFC = {
    "instance_id": "pod-1", "type": "vLLM", "endpoint": ENDPOINT, "modelname": "m", "block_size": 4, "dp_rank": 0,
    "tenant_id": "t",
}  # fmt: skip


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with embedded() as client:
        yield client


async def test_the_running_peers_dialect_is_answered_as_the_peer_does(client: httpx.AsyncClient) -> None:
    answer = await client.post("/register", json=PEER)
    assert (answer.status_code, answer.json()) == (201, {"status": "ok"})
    (worker,) = (await client.get("/workers")).json()
    assert (worker["instance_id"], worker["source"], worker["status"]) == ("1", "zmq", "pending")
    assert (worker["model_name"], worker["routing_group"], worker["block_size"]) == ("m", "default", 4)
    assert worker["endpoints"] == {"0": ENDPOINT}
    assert worker["listeners"]["0"]["endpoint"] == ENDPOINT
    empty: dict[str, Any] = {"scores": {}, "frequencies": [], "instances": {}}
    assert (await client.post("/query", json={"model_name": "m", "token_ids": [1, 2, 3, 4]})).json() == empty
    answer = await client.post("/unregister", json={"instance_id": 1, "model_name": "m"})
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert (await client.get("/workers")).json() == []


async def test_an_engine_that_is_not_heard_yet_is_part_of_the_fleet(client: httpx.AsyncClient) -> None:
    await client.post("/register", json=PEER)

    async def is_shown() -> bool:
        fleet = (await client.get("/fleet")).json()
        rows = [(each["worker"], each["state"]) for each in fleet["workers"]]
        return rows == [("1", "stale")] and str(fleet["verdict"][0]).startswith("1 stale")

    await async_wait_until(is_shown, 60, "the engine in the fleet")


async def test_the_rfcs_dialect_is_answered_as_the_rfc_requires(client: httpx.AsyncClient) -> None:
    answer = await client.post("/register", json=RFC)
    assert answer.json() == {"status": "registered successfully", "instance_id": "pod-1"}
    assert answer.status_code == 200
    (worker,) = (await client.get("/workers", params={"routing_group": "t"})).json()
    assert worker["instance_id"] == "pod-1"
    answer = await client.post("/unregister", json=RFC)
    assert answer.json() == {"status": "unregistered successfully", "removed_instances": ["pod-1|t|0"]}


async def test_msgpack_is_taken_too(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/msgpack"}
    assert (await client.post("/register", content=msgspec.msgpack.encode(PEER), headers=headers)).status_code == 201


@pytest.mark.parametrize("request_body", [PEER, RFC, {**PEER, "instance_id": "1"}, {**PEER, "unknown_field": [1]}])
async def test_an_equal_registration_changes_nothing(client: httpx.AsyncClient, request_body: dict[str, Any]) -> None:
    assert (await client.post("/register", json=request_body)).is_success
    assert (await client.post("/register", json=request_body)).status_code == 200
    assert len((await client.get("/workers")).json()) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"endpoint": "tcp://127.0.0.1:18002"}, "instance 1 dp_rank 0 already registered"),
        ({"replay_endpoint": "tcp://127.0.0.1:18002"}, "instance 1 dp_rank 0 already registered"),
        ({"model_name": "other"}, "instance 1 is already registered for model=m routing_group=default"),
        ({"routing_group": "other"}, "instance 1 is already registered for model=m routing_group=default"),
        (
            {"instance_id": 2, "block_size": 8},
            "block_size mismatch for model=m routing_group=default: existing=4, requested=8",
        ),
    ],
)
async def test_another_registration_of_the_same_is_a_conflict(
    client: httpx.AsyncClient, change: dict[str, Any], said: str
) -> None:
    await client.post("/register", json=PEER)
    problem = check_problem(await client.post("/register", json={**PEER, **change}), 409)
    assert problem["error"] == said


async def test_workers_of_several_block_sizes_may_be_registered_in_the_rfcs_dialect(client: httpx.AsyncClient) -> None:
    await client.post("/register", json=RFC)
    assert (await client.post("/register", json={**RFC, "instance_id": "2", "block_size": 8})).is_success
    problem = check_problem(await client.post("/register", json={**RFC, "modelname": "other"}), 409)
    assert problem["error"] == "instance pod-1 is already registered for model=m routing_group=t"


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"eagle": 1}, 422, "eagle"),
        ({"attention_chunk_size": 0}, 422, "attention_chunk_size"),
        ({"block_size": 0}, 422, "block_size"),
        ({"instance_id": True}, 422, "instance_id"),
        ({"instance_id": 1.5}, 422, "instance_id"),
        ({"instance_id": -1}, 422, "instance_id"),
        ({"instance_id": ""}, 422, "instance_id"),
        ({"instance_id": "x" * 257}, 422, "instance_id"),
        ({"instance_id": "é" * 200}, 422, "worker"),
        ({"dp_rank": 65_536}, 422, "dp_rank"),
        ({"model_name": ""}, 422, "model_name"),
        ({"endpoint": "bad"}, 400, "endpoint"),
        ({"endpoint": "http://h:1"}, 400, "endpoint"),
        ({"endpoint": "tcp://h"}, 400, "endpoint"),
        ({"endpoint": "tcp://h:0"}, 400, "endpoint"),
        ({"endpoint": "tcp://*:5557"}, 400, "endpoint"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, 400, "endpoint"),
        ({"endpoint": "tcp://[::]:5557"}, 400, "endpoint"),
        ({"endpoint": "tcp://10.0.0.1:1;evil:5557"}, 400, "endpoint"),
        ({"endpoint": "inproc://x"}, 400, "endpoint"),
        ({"endpoint": "tcp://-x:1"}, 400, "endpoint"),
        ({"endpoint": "tcp://_x:1"}, 400, "endpoint"),
        ({"endpoint": "tcp://.x:1"}, 400, "endpoint"),
        ({"endpoint": "ipc://@"}, 400, "endpoint"),
        ({"replay_endpoint": "tcp://-x:1"}, 400, "replay_endpoint"),
        ({"endpoint": "ipc:///run/x"}, 403, "endpoint"),
        ({"endpoint": "tcp://" + "h" * 600 + ":1"}, 422, "endpoint"),
        ({"replay_endpoint": "bad"}, 400, "replay_endpoint"),
        ({"replay_endpoint": "ipc:///run/x"}, 403, "replay_endpoint"),
    ],
)
async def test_what_is_not_acceptable_is_refused_by_name(
    client: httpx.AsyncClient, change: dict[str, Any], status: int, field: str
) -> None:
    check_problem(await client.post("/register", json={**PEER, **change}), status, field=field)
    assert (await client.get("/workers")).json() == []


@pytest.mark.parametrize("field", ["instance_id", "endpoint", "model_name"])
async def test_a_missing_field_is_named(client: httpx.AsyncClient, field: str) -> None:
    body = {name: value for name, value in PEER.items() if name != field}
    check_problem(await client.post("/register", json=body), 422, field=field)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"instance_id": 9, "model_name": "m"}, "instance 9 not found"),
        ({"instance_id": 1, "model_name": "x"}, "instance 1 is registered for model=m routing_group=default"),
        ({"instance_id": 1, "model_name": "m", "dp_rank": 3}, "instance 1 dp_rank 3 not found"),
        ({"instance_id": 1, "model_name": "m", "routing_group": "x"}, "instance 1 not found"),
    ],
)
async def test_what_is_not_registered_cannot_be_unregistered(
    client: httpx.AsyncClient, body: dict[str, Any], said: str
) -> None:
    await client.post("/register", json=PEER)
    assert check_problem(await client.post("/unregister", json=body), 404)["error"] == said


async def test_one_rank_may_go_alone(client: httpx.AsyncClient) -> None:
    for rank in range(3):
        await client.post("/register", json={**PEER, "dp_rank": rank, "endpoint": f"tcp://127.0.0.1:{18001 + rank}"})
    await client.post("/unregister", json={"instance_id": 1, "model_name": "m", "dp_rank": 1})
    (worker,) = (await client.get("/workers")).json()
    assert sorted(worker["listeners"]) == ["0", "2"]
    await client.post("/unregister", json={"instance_id": 1, "model_name": "m"})
    assert (await client.get("/workers")).json() == []


async def test_there_is_a_bound_on_registrations() -> None:
    async with embedded(max_registrations=2) as client:
        for number in range(2):
            assert (await client.post("/register", json={**PEER, "instance_id": number})).status_code == 201
        problem = check_problem(await client.post("/register", json={**PEER, "instance_id": 2}), 409)
        assert "--max-registrations" in problem["detail"]
        assert (await client.post("/register", json={**PEER, "instance_id": 1})).status_code == 200


@pytest.mark.parametrize(
    ("settings", "change", "variable"),
    [
        ({"max_namespaces": 1}, {"model_name": "other"}, "KVSIGHT_MAX_NAMESPACES"),
        ({"max_namespaces": 1}, {"routing_group": "other"}, "KVSIGHT_MAX_NAMESPACES"),
        ({"max_streams": 1}, {}, "KVSIGHT_MAX_STREAMS"),
    ],
)
async def test_an_engine_for_which_the_index_has_no_room_is_refused(
    settings: dict[str, Any], change: dict[str, Any], variable: str
) -> None:
    async with embedded(IndexerSettings(max_pages=2**16, **settings)) as client:
        assert (await client.post("/register", json=PEER)).status_code == 201
        problem = check_problem(await client.post("/register", json={**PEER, "instance_id": 2, **change}), 409)
        assert variable in problem["detail"]
        assert len((await client.get("/workers")).json()) == 1
        await client.post("/unregister", json=PEER)
        assert (await client.post("/register", json={**PEER, "instance_id": 2, **change})).status_code == 201


async def test_an_engine_that_the_index_does_not_take_shows_why(caplog: pytest.LogCaptureFixture) -> None:
    log = MemoryLog()
    consumer = create_consumer(IndexerSettings(max_pages=2**16), log)  # is never started
    registrations = Registrations(consumer, log, RegistrationSettings(), BridgeSettings(), None)
    async with registrations.running():
        engine = EngineSettings(endpoint=ENDPOINT, worker="1", model="m", block_size=4)
        assert await registrations.add(engine, is_peer=True)
        (status,) = registrations.status().values()
    assert "the index has accepted none of its batches" in (status.failure or "")
    assert "default/m/1/0 was registered, but the index has accepted none" in caplog.text


@pytest.mark.parametrize(
    ("request_body", "empty"),
    [
        (PEER, {"replay_endpoint": ""}),
        (PEER, {"routing_group": ""}),
        (PEER, {"dp_rank": None}),
        (RFC, {"replay_endpoint": "", "lora_name": "", "additionalsalt": "", "additional_salt": None}),
        (RFC, {"dp_rank": None}),
        ({**RFC, "tenant_id": "default"}, {"tenant_id": ""}),
    ],
)
async def test_what_is_empty_is_as_good_as_absent(
    client: httpx.AsyncClient, request_body: dict[str, Any], empty: dict[str, Any]
) -> None:
    assert (await client.post("/register", json=request_body)).is_success
    assert (await client.post("/register", json={**request_body, **empty})).status_code == 200
    (worker,) = (await client.get("/workers")).json()
    assert list(worker["listeners"]) == ["0"]
    assert (await client.post("/unregister", json={**request_body, **empty})).status_code == 200
    assert (await client.get("/workers")).json() == []


async def test_the_operator_states_where_the_service_may_connect_to() -> None:
    async with embedded(register_allow="tcp://127.9.*:*, ipc:///run/engines/*") as client:
        assert (await client.post("/register", json={**PEER, "endpoint": "tcp://127.9.3.4:5557"})).status_code == 201
        allowed = {**PEER, "instance_id": 2, "endpoint": "ipc:///run/engines/a"}
        assert (await client.post("/register", json=allowed)).status_code == 201
        for endpoint in ("tcp://169.254.169.254:80", "ipc:///run/engines/../x", "tcp://localhost:5557"):
            check_problem(await client.post("/register", json={**PEER, "instance_id": 3, "endpoint": endpoint}), 403)
    async with embedded(register_allow="") as client:
        check_problem(await client.post("/register", json=PEER), 403)
    with pytest.raises(InvalidValueError, match="--register-allow"):
        RegistrationSettings(register_allow="10.0.0.*.1")


async def test_a_service_that_reads_a_log_reports_it(serving: Any) -> None:
    async with serving() as (client, _):
        for path in ("/register", "/unregister"):
            problem = check_problem(await client.post(path, json=PEER), 404)
            assert ("kvsight bridge" if path == "/register" else "no stream of worker") in problem["detail"]


async def test_engines_have_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/register", json=PEER)
    text = (await client.get("/metrics")).text
    series = 'kvsight_bridge_link{dp_rank="0",model="m",state="connecting",tenant="default",worker="1"} 1.0'
    assert series in text
    assert "kvsight_registrations 1.0" in text


async def test_an_http_port_is_refused_at_once(client: httpx.AsyncClient) -> None:
    async with scripted(Reply(body=b"")) as server:
        address = server.url.replace("http", "tcp")
        problem = check_problem(await client.post("/register", json={**PEER, "endpoint": address}), 400)
        assert problem["field"] == "endpoint"
        assert "an HTTP server answers here" in problem["detail"]
    assert (await client.get("/workers")).json() == []


async def test_an_expired_worker_of_a_log_is_forgotten_and_one_that_is_heard_is_not(serving: Any) -> None:
    body, stream = {"instance_id": "a", "model_name": "m"}, Stream("a")
    async with serving() as (client, fed):
        await fed.feed(stream.batch(stored((0, [1, 2]))))
        check_problem(await client.post("/unregister", json=body), 404)
        assert (await client.get("/ready")).json()["schedulable_workers"] == 1
        await fed.feed(stream.batch(degraded_reason=CLOSED))
        assert (await client.get("/ready")).json()["schedulable_workers"] == 0
        (worker,) = (await client.get("/fleet")).json()["workers"]
        assert (worker["can_forget"], worker["can_resync"]) == (True, False)
        assert (await client.post("/unregister", json=body)).is_success
        assert (await client.get("/workers")).json() == []
