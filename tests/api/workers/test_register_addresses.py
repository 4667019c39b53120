"""Engines are read where their names lead, which is found out and judged again at each connection."""

from pathlib import Path
from urllib.parse import urlsplit

from bridge import EngineSettings
from kv_events.engine_wire import LocateError
from tests.rigs.bridge import LiveBridge
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import check_problem
from tests.support.servers.embedded_service import TOKENS, service
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import async_wait_until

NAME, REPLAY_NAME = "tcp://engine.invalid:5557", "tcp://engine.invalid:6557"
BODY = {"instance_id": 1, "model_name": "m", "block_size": 4}


def test_a_service_does_not_read_itself(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as served:
        served.wait_until_ready()
        for host in ("127.0.0.1", "localhost", "0x7f000001"):
            address = f"tcp://{host}:{urlsplit(served.url).port}"
            for fields in ({"endpoint": address}, {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": address}):
                problem = check_problem(served.post("/register", {**BODY, **fields}), 403)
                assert problem["field"] == list(fields)[-1]
                assert problem["value"] == address


async def test_an_engine_keeps_the_name_under_which_it_was_registered() -> None:
    with ZmqEngine(host="localhost") as engine:
        async with service() as served:
            await served.register(engine, replay_endpoint=engine.replay_endpoint)
            engine.send(payload(stored([1, 2], TOKENS[:8])))
            await served.holds(8)
            assert (await served.listener())["endpoint"] == engine.endpoint


async def test_a_name_that_is_not_known_yet_may_be_registered() -> None:
    async with service() as served:
        assert (await served.client.post("/register", json={**BODY, "endpoint": NAME})).status_code == 201
        assert (await served.listener())["failure"] == "engine.invalid: the host name is unknown"


async def test_an_engine_that_comes_back_elsewhere_is_read_there() -> None:
    """Nobody but `locate` can find the engines: their names lead nowhere."""
    where: dict[str, str | None] = {}

    async def locate(endpoint: str) -> str:
        address = where.get(endpoint)
        if address is None:
            raise LocateError("not found")
        return address

    async with LiveBridge(locate, bridge_idle_check_s=0.1) as bridge:
        engine = EngineSettings(endpoint=NAME, worker="w", model="m", block_size=4, replay_endpoint=REPLAY_NAME)
        await bridge.fleet.add(engine)
        await async_wait_until(lambda: bridge.status().failure == "not found", what="the failure")
        pages: set[tuple[int, int]] = set()
        for tokens in (TOKENS[:4], TOKENS[4:8]):
            with ZmqEngine() as engine_there:
                engine_there.send(payload(stored([1], tokens)))  # only a replay has it
                where.update({NAME: engine_there.endpoint, REPLAY_NAME: engine_there.replay_endpoint})
                await async_wait_until(lambda: bridge.status().failure is None, 60, "the connection")
                await async_wait_until(lambda: len(pages | bridge.view().pages) == len(pages) + 1, 60, "its page")
                pages.update(bridge.view().pages)
            await async_wait_until(lambda: bridge.status().failure is not None, 60, "the end of the connection")
