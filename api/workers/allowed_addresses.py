"""Addresses that registered engines may have: the entries of `--register-allow`, and what host names stand for.

A name is looked up and judged at each connection, which then goes to the address that was judged: a name that leads
elsewhere a moment later (DNS rebinding) gains nothing.
"""

import asyncio
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, NamedTuple, TypeAlias

from api.background import run_in_daemon_thread
from kv_events.engine_wire import LocateError
from kv_events.errors import InvalidValueError
from kv_events.runtime.variables import variable

_Address: TypeAlias = IPv4Address | IPv6Address
_Network: TypeAlias = IPv4Network | IPv6Network

_ENTRY = re.compile(r"(?:tcp://)?(\[[^\[\]]+\]|[^:\[\]]+)(?::(?:\*|([0-9]{1,5})(?:-([0-9]{1,5}))?))?")
_NAME = re.compile(r"(?:\*\.)?(?:[a-z0-9_-]+\.)*[a-z0-9_-]*[a-z][a-z0-9_-]*")
_PREFIX = re.compile(r"((?:[0-9]{1,3}\.){1,3})\*(?:\.\*)*")
_FORMS = (
    "10.0.0.0/16, engines.example, *.engines.example or *, each with :PORT or :FIRST-LAST if wanted, or ipc:///PATH"
)

_EVERYTHING: tuple[_Network, ...] = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))
_SPECIAL = [
    ip_network(text)
    for text in (
        *("0.0.0.0/8", "::", "169.254.0.0/16", "fe80::/10", "224.0.0.0/4", "ff00::/8", "240.0.0.0/4"),
        *("64:ff9b::/96", "2002::/16", "::ffff:0:0:0/96", "::a9fe:0/112"),
        *("169.254.169.254", "fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"),
    )
]
"""This host, link-local, multicast, reserved; forms of IPv4 addresses in IPv6; metadata of clouds.

Permitted only by an entry that names no more."""
_LOOKUP_S = 6.0
"""Resolvers repeat a question after five seconds."""
_MOST_LOOKUPS = 16
"""At a time, each in a thread of its own. Others wait for their turn."""
_KEPT_S = 30.0
"""Time for which the answer to a look-up is kept if nobody waited for it any longer."""


class AddressRefusedError(LocateError):
    """The service may not connect there."""


class _Entry(NamedTuple):
    networks: tuple[_Network, ...]
    name: str
    """Host name, or `*.` and the end of host names. Empty: the networks count."""
    ports: range

    def permits(self, host: str, port: int, address: _Address | None) -> bool:
        """address: that of the host. None: it is not known, so return whether any may be permitted."""
        special = [each for each in _SPECIAL if address is not None and address in each]
        if self.name:
            is_named = host == self.name or (self.name[0] == "*" and host.endswith(self.name[1:]))
            return is_named and not special and port in self.ports
        return port in self.ports and any(
            address is None or (address in network and all(network.subnet_of(each) for each in special))  # type: ignore[arg-type]
            for network in self.networks
        )


class AllowedAddresses:
    """The addresses that a service may connect to. Raises InvalidValueError for entries that cannot be read."""

    def __init__(self, entries: str, own_port: int | None = None, trusted: Collection[str] = ()) -> None:
        """entries: separated by commas. own_port: on which this service listens itself. trusted: endpoints that the
        operator has named, which need no entry."""
        self._trusted = trusted
        texts = [text.strip() for text in entries.split(",") if text.strip()]
        self._paths = [text for text in texts if text.startswith("ipc://")]
        self._entries = [_entry(text) for text in texts if text not in self._paths]
        self._own_port = own_port
        self._places = asyncio.Semaphore(_MOST_LOOKUPS)
        self._lookups: dict[str, asyncio.Task[list[Any]]] = {}  # by host; those that run, or whose answer is kept

    async def locate(self, endpoint: str) -> str:
        """Return a valid endpoint with a permitted address of its host. See `Locate`. Raises AddressRefusedError."""
        is_trusted = endpoint in self._trusted
        if not endpoint.startswith("tcp://"):
            if not is_trusted and (".." in endpoint or not any(fnmatchcase(endpoint, path) for path in self._paths)):
                raise _refusal(endpoint, "the path")
            return endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        may_ask = is_trusted or self._permits(host, int(port), None)
        addresses = await self._look_up(host.strip("[]")) if may_ask else []
        for text in addresses:
            address = ip_address(text)
            address = getattr(address, "ipv4_mapped", None) or address
            if is_trusted or self._permits(host, int(port), address):
                return f"tcp://{address}:{port}" if address.version == 4 else f"tcp://[{address}]:{port}"
        raise _refusal(endpoint, ", ".join(addresses) or host)

    async def _look_up(self, host: str) -> list[str]:
        """Return the addresses of a host, those of IPv4 first, as engines listen there unless told otherwise."""
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):  # it is a name
            if host not in self._lookups:
                self._lookups[host] = asyncio.create_task(self._resolve(host), name=f"look-up:{host}")
            try:
                async with asyncio.timeout(_LOOKUP_S):
                    found = await asyncio.shield(self._lookups[host])
                self._lookups.pop(host, None)
            except TimeoutError:
                raise LocateError(f"{host}: no address was found within {_LOOKUP_S:.0f} s") from None
        if not found:
            raise LocateError(f"{host}: the host name is unknown")
        numbers = [socket.getnameinfo(each[4], socket.NI_NUMERICHOST)[0] for each in found]  # with the zone, if any
        return sorted(numbers, key=lambda number: ":" in number)

    async def _resolve(self, host: str) -> list[Any]:
        """Ask the name servers, even if nobody waits any longer: who asks again has the answer or this place."""
        found: list[Any] = []
        async with self._places:
            with suppress(OSError, UnicodeError):
                await run_in_daemon_thread(
                    lambda: found.extend(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
                )
        asyncio.get_running_loop().call_later(_KEPT_S, self._lookups.pop, host, None)
        return found

    def _permits(self, host: str, port: int, address: _Address | None) -> bool:
        if address is not None and port == self._own_port and _is_own(address):
            return False
        name = host.lower().rstrip(".")
        return any(entry.permits(name, port, address) for entry in self._entries)


def _refusal(endpoint: str, what: str) -> AddressRefusedError:
    return AddressRefusedError(f"{endpoint}: {what} is not permitted by {variable('register_allow')}")


def _entry(text: str) -> _Entry:
    fault = InvalidValueError(variable("register_allow"), text, _FORMS)
    if "[" not in text and text.count(":") > 1 and "://" not in text:
        text = f"[{text}]"  # an IPv6 network
    found = _ENTRY.fullmatch(text.lower())
    if found is None:
        raise fault
    host, first, last = found[1].strip("[]"), int(found[2] or 1), int(found[3] or found[2] or 65_535)
    if not 1 <= first <= last <= 65_535:
        raise fault
    ports = range(first, last + 1)
    if host == "*":
        return _Entry(_EVERYTHING, "", ports)
    if prefix := _PREFIX.fullmatch(host):  # 10.0.* of earlier versions
        octets = prefix[1].rstrip(".").split(".")
        host = f"{'.'.join(octets + ['0'] * (4 - len(octets)))}/{8 * len(octets)}"
    elif _NAME.fullmatch(host):
        return _Entry((), host, ports)
    try:
        return _Entry((ip_network(host),), "", ports)
    except ValueError:
        raise fault from None


def _is_own(address: _Address) -> bool:
    """Return whether this machine has the address: only then can a socket be bound to it."""
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True
