"""`KVSIGHT_REGISTER_ALLOW`: which addresses its entries permit, and where a service connects to."""

import pytest

from api.settings import RegistrationSettings
from api.workers.allowed_addresses import AddressRefusedError, AllowedAddresses
from kv_events.engine_wire import LocateError
from kv_events.errors import InvalidValueError

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
