"""A bridge or a registration with a wrong address says what is wrong with it."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from api.settings import RegistrationSettings
from api.workers.registrations import Registrations
from bridge import BridgeSettings, EngineSettings
from bridge.stream.subscriber import why_unreachable
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from kv_events.log.memory import MemoryLog
from tests.support.commands import RunningCommand
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.servers.embedded_service import TOKENS, service
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("an engine must be given up within its deadline")

REFUSED = "connection refused"


async def test_a_registered_address_that_refuses_connections_is_shown_until_an_engine_listens() -> None:
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    async with service() as served:
        body = {"instance_id": 1, "endpoint": endpoint, "block_size": 4, "model_name": "m"}
        assert (await served.client.post("/register", json=body)).is_success

        async def shown() -> tuple[str, str | None]:
            listener = await served.listener()
            return listener["status"], listener["failure"]

        async def is_refused() -> bool:
            return await shown() == ("failed", f"cannot connect to {endpoint}: {REFUSED}")

        async def is_active() -> bool:
            return await shown() == ("active", None)

        await async_wait_until(is_refused, 60, "the reason")
        labels = 'dp_rank="0",model="m",state="unreachable",tenant="default",worker="1"'
        assert f"kvsight_bridge_link{{{labels}}} 1.0" in (await served.client.get("/metrics")).text
        with ZmqEngine(port=port):
            await async_wait_until(is_active, 60, "the connection")


async def test_an_engine_that_died_says_why_it_is_not_reached_and_since_when() -> None:
    engine = ZmqEngine()
    async with service() as served:
        with engine:
            await served.register(engine)

        async def is_explained() -> bool:
            return REFUSED in (await served.listener())["cause"]

        await async_wait_until(is_explained, 60, "the cause")
        listener = await served.listener()
        assert (listener["status"], 0 < listener["cause_since"] <= time.time()) == ("failed", True)
        (worker,) = (await served.client.get("/fleet")).json()["workers"]
        assert (worker["cause"], worker["endpoint"]) == (listener["cause"], engine.endpoint)
        assert worker["since"] == pytest.approx(listener["cause_since"], abs=0.5)
        assert (worker["can_resync"], worker["can_forget"]) == (False, True)


async def test_only_what_can_be_unregistered_is_offered_to_be_forgotten() -> None:
    named = EngineSettings(endpoint=f"tcp://127.0.0.1:{free_port()}", bind=True, topic="kv@")
    gone = EngineSettings(endpoint=f"tcp://127.0.0.1:{free_port()}", worker="gone", model="m", block_size=4)
    async with service(configured=[named, gone]) as served:
        with ZmqEngine(replay=False, topic="kv@pod@m", connect_to=named.endpoint) as pod:
            await asyncio.to_thread(pod.wait_for_readers)
            pod.send(payload(stored([1, 2, 3, 4], TOKENS)))
            await served.holds(16, instance="pod")
            workers = (await served.client.get("/fleet")).json()["workers"]
        assert {each["worker"]: each["can_forget"] for each in workers} == {"pod": False, "gone": True}
        for worker, status in {"pod": 404, "gone": 200}.items():
            answer = await served.client.post("/unregister", json={"instance_id": worker, "model_name": "m"})
            assert answer.status_code == status


class HeldStore:
    """Saves nothing, and nothing is saved until the test permits it."""

    def __init__(self) -> None:
        self.permitted = asyncio.Event()

    async def load(self) -> None:
        return None

    async def save(self, _pieces: Any) -> None:
        await self.permitted.wait()

    async def close(self) -> None:
        pass


async def test_an_engine_that_is_back_before_its_turn_is_not_unregistered() -> None:
    port, log, store = free_port(), MemoryLog(), HeldStore()
    consumer = create_consumer(IndexerSettings(max_pages=2**16), log)
    back = EngineSettings(endpoint=f"tcp://127.0.0.1:{port}", worker="back", model="m")
    given = RegistrationSettings(forget_engine_s=0.5)
    registrations = Registrations(consumer, log, given, BridgeSettings(), store)
    known = lambda: {stream.worker: status.down_s for stream, status in registrations.status().items()}  # noqa: E731
    async with registrations.running():
        adding = asyncio.create_task(registrations.add(back, is_peer=True))  # keeps others waiting, as it is saved
        await async_wait_until(lambda: (known().get("back") or 0) > 2, 60, "an engine that is long gone")
        with ZmqEngine(port=port):
            await async_wait_until(lambda: known()["back"] is None, 60, "the connection")
            store.permitted.set()
            await adding
            other = msgspec.structs.replace(back, endpoint=f"tcp://127.0.0.1:{free_port()}", worker="other")
            await registrations.add(other, is_peer=True)
            await async_wait_until(lambda: "other" not in known(), 60, "another one to be forgotten")
            assert known() == {"back": None}


def test_a_bridge_with_a_wrong_address_logs_one_line(tmp_path: Path) -> None:
    port, metrics_port = free_port(), free_port()
    words = ["bridge", "--event-log-dir", tmp_path / "log", "--metrics-port", metrics_port]
    with RunningCommand(*words, "--engine", f"worker=w,model=m,endpoint=tcp://127.0.0.1:{port}") as command:
        command.wait_for("cannot connect")
        failed = 'kvsight_bridge_failed{dp_rank="0",model="m",tenant="default",worker="w"} 1.0'
        assert failed in httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
        command.end(signal.SIGTERM)
    assert command.err.count("cannot connect") == 1
    assert f"bridge: w: cannot connect to tcp://127.0.0.1:{port}: connection refused" in command.err


async def test_the_reason_names_what_is_wrong(tmp_path: Path) -> None:
    refused, silent = f"tcp://127.0.0.1:{free_port()}", f"ipc://{tmp_path}/nothing"
    assert await why_unreachable(refused) == f"cannot connect to {refused}: {REFUSED}"
    assert await why_unreachable(silent) == f"cannot connect to {silent}: no such file or directory"
    assert "the host name is unknown" in str(await why_unreachable("tcp://no-such-host.invalid:5557"))
    assert await why_unreachable("inproc://engine") is None
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        reason = await why_unreachable(f"tcp://127.0.0.1:{port}")
    assert reason == f"tcp://127.0.0.1:{port} accepts connections, but has not answered as a ZMQ publisher"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:notaport", "tcp://[::1", "ipc://" + "x" * 200])
async def test_an_address_that_makes_no_sense_is_a_reason_too(address: str) -> None:
    assert "cannot connect" in str(await why_unreachable(address))
