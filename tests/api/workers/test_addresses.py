"""Addresses that may be registered, and engines that are read where their names lead."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from api.settings import RegistrationSettings
from api.workers.allowed_addresses import AddressRefusedError, AllowedAddresses
from bridge import EngineSettings
from bridge.stream import subscriber
from kv_events.engine_wire import LocateError
from kv_events.errors import InvalidValueError
from tests.rigs.bridge import LiveBridge
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import check_problem
from tests.support.servers.embedded_service import TOKENS, reading, service
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import async_wait_until

MANY = "10.0.0.0/16:5557-5560, *.Engines.example, [fd00::/8]:7, fd77::/16, LOCALHOST:9, ipc:///run/engines/*"
NAMED = "169.254.0.0/16, 169.254.169.254:80, fe80::/10, 100.100.100.200"


@pytest.mark.parametrize(
    ("entries", "host", "found"),
    [
        ("*", "10.0.0.1:1", "10.0.0.1:1"),
        ("*", "localhost:1", "127.0.0.1:1"),
        ("*", "[::1]:1", "[::1]:1"),
        ("*", "[::ffff:10.0.0.1]:1", "10.0.0.1:1"),
        ("*", "0x7f000001:1", "127.0.0.1:1"),
        ("*", "127.1:1", "127.0.0.1:1"),
        ("*", "010.0.0.1:1", "8.0.0.1:1"),
        ("tcp://*", "10.0.0.1:1", "10.0.0.1:1"),
        ("tcp://*:*", "10.0.0.1:1", "10.0.0.1:1"),
        ("tcp://127.0.0.1:*", "2130706433:1", "127.0.0.1:1"),
        ("tcp://localhost:*", "localhost:1", "127.0.0.1:1"),
        ("tcp://10.0.*:*", "10.0.3.4:1", "10.0.3.4:1"),
        ("tcp://10.*", "10.5.3.4:1", "10.5.3.4:1"),
        (MANY, "10.0.3.4:5560", "10.0.3.4:5560"),
        (MANY, "[fd01::1]:7", "[fd01::1]:7"),
        (MANY, "[fd77::1]:8", "[fd77::1]:8"),
        (MANY, "localhost:9", "127.0.0.1:9"),
        (NAMED, "169.254.0.1:1", "169.254.0.1:1"),
        (NAMED, "169.254.169.254:80", "169.254.169.254:80"),
        (NAMED, "[fe80::1%lo]:1", "[fe80::1%lo]:1"),
        (NAMED, "100.100.100.200:1", "100.100.100.200:1"),
    ],
)
async def test_an_address_is_permitted_by_its_number(entries: str, host: str, found: str) -> None:
    assert await AllowedAddresses(entries).locate(f"tcp://{host}") == f"tcp://{found}"


@pytest.mark.parametrize(
    ("entries", "endpoint"),
    [
        ("", "tcp://10.0.0.1:1"),
        ("", "tcp://no-such-host.invalid:1"),
        ("*", "ipc:///run/engines/a"),
        *(("*", f"tcp://{host}:1") for host in ("169.254.169.254", "169.254.0.1", "2852039166", "0xa9fea9fe", "0")),
        *(("*", f"tcp://{host}:1") for host in ("[::ffff:169.254.169.254]", "[::]", "[fe80::1]", "[ff02::1]")),
        *(("*", f"tcp://{host}:1") for host in ("[64:ff9b::a9fe:a9fe]", "[::169.254.169.254]", "[2002:a9fe:a9fe::1]")),
        *(("*", f"tcp://{host}:1") for host in ("[fd00:ec2::254]", "100.100.100.200", "224.0.0.1", "255.255.255.255")),
        ("169.254.0.0/16", "tcp://169.254.169.254:1"),
        (NAMED, "tcp://169.254.169.254:1"),
        ("tcp://10.0.*:*", "tcp://10.1.0.1:1"),
        ("tcp://10.0.*:*", "tcp://localhost:1"),
        (MANY, "tcp://10.0.3.4:5561"),
        (MANY, "tcp://[fd01::1]:8"),
        (MANY, "tcp://localhost:8"),
        (MANY, "tcp://127.0.0.1:9"),
        (MANY, "ipc:///run/engines/../x"),
    ],
)
async def test_any_other_address_is_refused(entries: str, endpoint: str) -> None:
    with pytest.raises(AddressRefusedError, match="--register-allow") as refused:
        await AllowedAddresses(entries).locate(endpoint)
    assert str(refused.value).startswith(endpoint)


@pytest.mark.parametrize("host", ["a.engines.example.invalid", "10.0.evil.invalid", "x" * 64 + ".invalid"])
async def test_a_name_that_nobody_knows_is_not_refused(host: str) -> None:
    with pytest.raises(LocateError, match="the host name is unknown") as unknown:
        await AllowedAddresses("*.invalid, 10.0.0.0/16").locate(f"tcp://{host}:5557")
    assert not isinstance(unknown.value, AddressRefusedError)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.5", "[::ffff:127.0.0.1]"])
async def test_the_service_itself_is_refused(host: str) -> None:
    allowed = AllowedAddresses("*, 127.0.0.0/8", own_port=8000)
    with pytest.raises(AddressRefusedError):
        await allowed.locate(f"tcp://{host}:8000")
    assert await allowed.locate("tcp://127.0.0.1:8001")
    assert await allowed.locate("tcp://192.0.2.1:8000")  # no address of this machine


@pytest.mark.parametrize(
    "entry",
    [
        *("10.0.3.4/16", "vllm-*", "tcp://10.0.0.1*", "10.*.1", "300.1.*", "127.1", "*.", "tcp://", "http://x", "[::1"),
        *("a:b", "a:0", "a:70000", "a:5-3", "tcp://*.evil*:1"),
    ],
)
def test_an_entry_that_is_not_understood_stops_the_start(entry: str) -> None:
    with pytest.raises(InvalidValueError, match=r"--register-allow: got .*, expected 10\.0\.0\.0/16"):
        RegistrationSettings(register_allow=f"10.0.0.0/8,{entry}")


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
    async with reading(ZmqEngine(host="localhost"), with_replay=True) as (served, engine):
        engine.send(payload(stored([1, 2], TOKENS[:8])))
        await served.holds(8)
        assert (await served.listener())["endpoint"] == engine.endpoint


async def test_a_name_that_is_not_known_yet_may_be_registered() -> None:
    async with service() as served:
        assert (await served.client.post("/register", json={**BODY, "endpoint": NAME})).status_code == 201
        assert (await served.listener())["failure"] == "engine.invalid: the host name is unknown"


async def test_an_engine_that_comes_back_elsewhere_is_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but `locate` can find the engines: their names lead nowhere."""
    monkeypatch.setattr(subscriber, "_PROBE_S", 0.5)
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
            await async_wait_until(lambda: bridge.status().failure is not None, 60, "the end of the connection")
            with ZmqEngine() as engine_there:
                engine_there.send(payload(stored([1], tokens)))  # only a replay has it
                where.update({NAME: engine_there.endpoint, REPLAY_NAME: engine_there.replay_endpoint})
                await async_wait_until(lambda: bridge.status().failure is None, 60, "the connection")
                await async_wait_until(lambda: len(pages | bridge.view().pages) == len(pages) + 1, 60, "its page")
                pages.update(bridge.view().pages)
