"""POST, PATCH and DELETE /workers: Dynamo's answers, and what they do to the choice of workers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.settings import RegistrationSettings
from bridge import EngineSettings
from tests.rigs.api import embedded
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.servers.child_process import free_port
from tests.support.servers.embedded_service import TOKENS, Service, service
from tests.support.servers.peer_indexer import PeerIndexer
from tests.support.waiting import async_wait_until

PORTS = [free_port() for _ in range(8)]
PROMPT = {"model_name": "m", "token_ids": TOKENS}


def record(worker: int | str, **fields: Any) -> dict[str, Any]:
    return {
        "worker_id": worker,
        "model_name": "m",
        "block_size": 16,
        "endpoint": f"http://127.0.0.1:{PORTS[0]}",
    } | fields


def events(*ranks: int) -> dict[str, Any]:
    return {"kv_events_endpoints": {str(rank): f"tcp://127.0.0.1:{PORTS[rank]}" for rank in ranks}}


DIALECT: list[tuple[str, str, Any]] = [
    ("GET", "/workers", None),
    ("POST", "/workers", {"worker_id": 6}),
    ("DELETE", "/workers/6", None),
    ("POST", "/workers", {}),
    ("POST", "/workers", record(1)),
    ("POST", "/workers", record(2, **events(0), total_kv_blocks=1000, max_num_batched_tokens=8192)),
    ("POST", "/workers", record(2, **events(0), is_eagle=False, taints=["x"], topology_domains={"zone": "a"})),
    ("POST", "/workers", record(3, **events(1), block_size=32)),
    ("POST", "/workers", record(3, **events(1), data_parallel_size=2)),
    ("POST", "/workers", record(3, **events(1, 2), data_parallel_start_rank=1, data_parallel_size=2)),
    ("POST", "/workers", record(3, **events(1, 2))),
    ("POST", "/workers", record(3, kv_events_endpoint=f"tcp://127.0.0.1:{PORTS[1]}", data_parallel_size=2)),
    ("POST", "/workers", record(4, **events(0), data_parallel_size=0)),
    ("POST", "/workers", record(4, **events(3), block_size=0)),
    ("POST", "/workers", record(4, **events(3), replay_endpoint="bad")),
    ("POST", "/workers", record(4, kv_events_endpoints={"0": "bad"})),
    ("POST", "/workers", record(4, **events(), kv_transfer_enforcement="required", kv_transfer_preferred_weight=-1)),
    ("POST", "/workers", record(4, kv_transfer_enforcement="x")),
    ("POST", "/workers", record(-1)),
    ("POST", "/workers", record(4, model_name=None)),
    ("PATCH", "/workers/2", {"total_kv_blocks": 2000, "model_name": "n", "routing_group": "g", "worker_id": 9}),
    ("PATCH", "/workers/2", {"endpoint": None, "taints": [], "stable_routing_id": "s"}),
    ("PATCH", "/workers/2", {"total_kv_blocks": "x"}),
    ("PATCH", "/workers/2", []),
    ("PATCH", "/workers/9", {"total_kv_blocks": 2000}),
    ("POST", "/workers", record(5, **events(4), model_name="n")),
    ("GET", "/workers?model_name=n", None),
    ("GET", "/workers?model_name=m", None),
    ("DELETE", "/workers/9", None),
    ("DELETE", "/workers/2", None),
    ("DELETE", "/workers/2", None),
    ("GET", "/workers", None),
]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[PeerIndexer]:
    with PeerIndexer(tmp_path / "peer.log", module="dynamo.select_service") as running:
        yield running


def shown(answer: Any) -> Any:
    """Return what clients of the peer may rely on. How an answer words a failed registration is its own affair."""
    if isinstance(answer, list):
        return sorted(map(shown, answer), key=lambda each: each["worker_id"])
    reasons = [each.partition(": ")[0] for each in answer.get("not_schedulable_reasons", [])]
    return answer | {"not_schedulable_reasons": reasons}


def check_equal(peer: httpx.Response, own: httpx.Response) -> None:
    assert own.status_code == peer.status_code, own.text
    if own.is_error:
        assert own.json()["error"]
        if own.status_code == httpx.codes.NOT_FOUND:
            assert own.json()["error"] == peer.json()["error"]
        return
    theirs, found = shown(peer.json()), shown(own.json())
    for one, other in zip(*((each if isinstance(each, list) else [each]) for each in (theirs, found)), strict=True):
        assert {name: other[name] for name in one} == one


async def test_answers_are_those_of_the_peer_except_that_it_moves_a_worker_to_another_model(peer: PeerIndexer) -> None:
    async with embedded() as client:
        for method, path, body in DIALECT:
            given = {} if body is None else {"json": body}
            check_equal(peer.request(method, path, **given), await client.request(method, path, **given))
        for scope in ({"model_name": "n"}, {"routing_group": "g"}):
            moved = record(3, **scope)
            assert peer.request("POST", "/workers", json=moved).status_code == 201
            problem = check_problem(await client.post("/workers", json=moved), 409)
            assert problem["field"] == "worker_id"
            assert "model=m routing_group=default" in problem["detail"]
        (kept,) = (each for each in (await client.get("/workers?model_name=m")).json() if each["worker_id"] == 3)
        assert kept["kv_events_endpoint"] == f"tcp://127.0.0.1:{PORTS[1]}"


async def test_a_word_that_no_field_knows_is_answered_with_those_that_it_does() -> None:
    async with service() as served:
        for field, known in (("role", "'', 'decode', 'prefill'"), ("lifecycle", "'draining', 'incomplete', ")):
            problem = check_problem(await served.client.post("/workers", json=record(3, **{field: "zz"})), 422)
            assert problem["detail"].startswith(f"{field}: got 'zz', expected one of {known}")


@asynccontextmanager
async def chosen_among(served: Service) -> AsyncIterator[ZmqEngine]:
    """Register worker 7, which holds a prompt."""
    with ZmqEngine() as engine:
        body = record(7, block_size=4, kv_events_endpoints={"0": engine.endpoint})
        answer = await served.client.post("/workers", json=body)
        assert (answer.status_code, answer.json()["lifecycle"]) == (201, "schedulable")
        await asyncio.to_thread(engine.wait_for_readers)
        engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
        await served.holds(16, instance=7)
        yield engine


async def select(served: Service) -> tuple[int, Any]:
    answer = await served.client.post("/select", json=PROMPT)
    return answer.status_code, answer.json().get("endpoint")


async def ready_workers(client: httpx.AsyncClient) -> Any:
    answer = (await client.get("/ready")).json()
    assert answer["ready"]
    return answer["schedulable_workers"]


async def test_a_registered_worker_is_read_chosen_drained_and_deleted() -> None:
    async with service() as served, chosen_among(served):
        assert await select(served) == (200, f"http://127.0.0.1:{PORTS[0]}")
        assert await ready_workers(served.client) == 1

        await served.client.patch("/workers/7", json={"lifecycle": "draining", "total_kv_blocks": 100})
        assert (await select(served))[0] == 503
        assert await ready_workers(served.client) == 0
        assert await served.gpu(TOKENS, 7) == 16  # queries still know it
        (worker,) = (await served.client.get("/fleet")).json()["workers"]
        assert worker["capacity"] == {"GPU": 100}
        await served.client.patch("/workers/7", json={"lifecycle": "schedulable"})
        assert (await select(served))[0] == 200

        assert (await served.client.delete("/workers/7")).json()["lifecycle"] == "unschedulable"
        assert (await select(served))[0] == 503
        assert (await served.client.get("/workers")).json() == []


async def test_the_same_record_again_keeps_the_pages_and_other_addresses_do_not() -> None:
    async with service() as served, chosen_among(served) as engine:
        body = record(7, block_size=4, kv_events_endpoints={"0": engine.endpoint}, role="decode", taints=["t"])
        assert (await served.client.post("/workers", json=body)).json()["role"] == "decode"
        assert await served.gpu(TOKENS, 7) == 16
        body["kv_events_endpoints"] = events(0)["kv_events_endpoints"]
        assert (await served.client.post("/workers", json=body)).json()["lifecycle"] == "schedulable"
        assert await served.gpu(TOKENS, 7) == 0


async def test_records_survive_a_restart(tmp_path: Path) -> None:
    with ZmqEngine() as engine:
        body = record("w/1", block_size=4, kv_events_endpoints={"0": engine.endpoint}, lifecycle="draining")
        async with service(snapshot_dir=tmp_path) as served:
            await served.client.post("/workers", json=body)
            before = (await served.client.post("/workers", json=record("2"))).json()
            assert before["worker_id"] == 2
        async with service(snapshot_dir=tmp_path) as served:
            await async_wait_until(served.is_ready, 60)
            found = {each["worker_id"]: each for each in (await served.client.get("/workers")).json()}
            assert found["w/1"]["lifecycle"] == "draining"
            assert {name: found[2][name] for name in before} == before
            assert (await served.client.delete("/workers/w/1")).is_success


async def test_a_named_engine_has_the_address_that_the_operator_gave() -> None:
    with ZmqEngine() as engine:
        named = EngineSettings(
            endpoint=engine.endpoint, worker="e", model="m", block_size=4, url="http://10.1.2.3:80/x"
        )
        async with service(registration=RegistrationSettings(register_allow=""), configured=[named]) as served:
            await async_wait_until(served.is_ready, 60)
            assert await select(served) == (200, "http://10.1.2.3:80/x")


async def test_a_worker_of_a_log_is_schedulable_once_it_is_known_there(client: httpx.AsyncClient, fed: HandFed) -> None:
    body = record("7", **events(1))
    del body["block_size"]
    assert (await client.post("/workers", json=body)).json()["lifecycle"] == "incomplete"
    del body["kv_events_endpoints"]
    assert (await client.post("/workers", json=body)).json()["lifecycle"] == "incomplete"
    await fed.hold(Stream("7"), TOKENS)
    await fed.hold(Stream("8"), TOKENS)
    assert await ready_workers(client) == 2  # a worker without a record may be chosen, too
    assert (await client.post("/select", json=PROMPT | {"allowed_worker_ids": [7]})).json()["endpoint"] == body[
        "endpoint"
    ]
    assert (await client.post("/select", json=PROMPT | {"allowed_worker_ids": [8]})).json()["endpoint"] is None


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"kv_events_endpoints": {"0": "tcp://169.254.169.254:1"}}, 403),
        ({"kv_events_endpoints": {"0": "tcp://127.0.0.1:1"}, "replay_endpoint": "tcp://169.254.169.254:1"}, 403),
        ({"endpoint": "bad"}, 422),
        ({"endpoint": "http://user:secret@127.0.0.1:1"}, 422),
        ({"endpoint": "http://127.0.0.1:1/?q"}, 422),
        ({"endpoint": "http://127.0.0.1:1\n"}, 422),
        ({"endpoint": "file:///etc/passwd"}, 422),
        ({"worker_id": "n" * 300}, 422),
        ({"data_parallel_size": 10**6}, 422),
        ({"kv_events_endpoints": {str(rank): "x" for rank in range(1025)}}, 422),
        ({"taints": ["t"] * 65}, 422),
        ({"lifecycle": "gone"}, 422),
        ({"stable_routing_id": "s" * 70_000}, 413),
    ],
)
async def test_refused_records_change_nothing(fields: dict[str, Any], status: int) -> None:
    async with embedded() as client:
        problem = check_problem(await client.post("/workers", json=record(1, **fields)), status)
        assert (await client.get("/workers")).json() == []
        if [*fields] == ["endpoint"]:
            assert problem["detail"].endswith(", expected http://HOST:PORT")


async def test_changes_at_the_same_time_are_all_made() -> None:
    async with embedded() as client:
        await client.post("/workers", json=record(1, **events(0)))
        moved = {"kv_events_endpoints": {"0": f"tcp://127.0.0.1:{PORTS[1]}"}}
        changes = [{"total_kv_blocks": 5} | moved, {"lifecycle": "draining"}, {"taints": ["t"]}]
        await asyncio.gather(*(client.patch("/workers/1", json=change) for change in changes))
        (found,) = (await client.get("/workers")).json()
        assert (found["total_kv_blocks"], found["lifecycle"], found["taints"]) == (5, "draining", ["t"])


async def test_the_number_of_records_is_bounded() -> None:
    async with embedded(max_registrations=1024) as client:
        answers = [(await client.post("/workers", json={"worker_id": n})).status_code for n in range(1026)]
        assert answers == [201] * 1024 + [409] * 2
        assert (await client.post("/workers", json={"worker_id": 3})).status_code == 201


async def test_the_ranks_of_all_records_are_bounded() -> None:
    async with embedded() as client:  # 1024 ranks
        assert (await client.post("/workers", json=record(1, data_parallel_size=600))).status_code == 201
        problem = check_problem(await client.post("/workers", json=record(2, data_parallel_size=425)), 409)
        assert (problem["field"], problem["value"]) == ("data_parallel_size", 425)
        assert (await client.post("/workers", json=record(2, data_parallel_size=424))).status_code == 201
        check_problem(await client.patch("/workers/1", json={"data_parallel_size": 601}), 409)
        assert (await client.patch("/workers/1", json={"data_parallel_size": 599})).status_code == 200


@asynccontextmanager
async def silent_ports(number: int) -> AsyncIterator[list[str]]:
    """Addresses where connections are accepted, and nothing is ever said."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        await reader.read()
        writer.close()

    servers = [await asyncio.start_server(say_nothing, "127.0.0.1", 0) for _ in range(number)]
    yield [f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    for server in servers:
        server.close()


async def test_other_changes_do_not_wait_for_the_addresses_of_a_record() -> None:
    async with embedded() as client, silent_ports(20) as addresses:
        await client.post("/workers", json=record(1))
        await client.post("/workers", json=record(2))
        ranks = {"kv_events_endpoints": dict(enumerate(addresses)), "data_parallel_size": len(addresses)}
        began = asyncio.get_running_loop().time()
        slow = asyncio.create_task(client.post("/workers", json=record(2, **ranks)))
        await asyncio.sleep(0)
        for path in ("/workers/1", "/workers/2"):
            assert (await client.patch(path, json={"lifecycle": "draining"})).status_code == 200
        assert (await client.delete("/workers/1")).status_code == 200
        assert not slow.done()
        assert (await slow).json()["lifecycle"] == "schedulable"
        assert asyncio.get_running_loop().time() - began < 15  # one after the other, they take 20 s


async def test_a_change_meanwhile_is_not_lost() -> None:
    async with embedded() as client, silent_ports(1) as (address,):
        await client.post("/workers", json=record(1))
        slow = asyncio.create_task(client.patch("/workers/1", json={"kv_events_endpoints": {"0": address}}))
        await client.patch("/workers/1", json={"taints": ["t"]})
        assert not slow.done()
        found = (await slow).json()
        assert (found["taints"], found["kv_events_endpoints"]) == (["t"], {"0": address})


async def test_a_record_is_judged_again_once_its_stream_is_known_and_once_it_is_forgotten(
    client: httpx.AsyncClient, fed: HandFed
) -> None:
    async def lifecycle() -> Any:
        return [each["lifecycle"] for each in (await client.get("/workers")).json()]

    await client.post("/workers", json=record("7"))
    assert await lifecycle() == ["incomplete"]
    await fed.hold(Stream("7"), TOKENS)
    assert await lifecycle() == ["schedulable"]
    await fed.consumer.forget([view.stream for view in fed.consumer.namespaces.views])
    assert await lifecycle() == ["incomplete"]
