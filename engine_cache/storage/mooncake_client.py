"""A Mooncake client that answers in bounded time, whatever happens to the master.

The native client crashes the process when it is used after `close()`, blocks for seconds in every call while the master
is unreachable, and returns codes. This client raises after `close()`, answers at once while the master is known to be
unreachable, and distinguishes success, absence and failure. No torch: memory is given by address.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from engine_cache.settings import MooncakeSettings
from engine_cache.storage.base import StorageClosedError
from kv_events.errors import InvalidValueError, KvsightError

try:
    from mooncake.store import MooncakeDistributedStore
except ImportError as missing:
    raise ImportError(
        f"a Mooncake store needs kvsight[mooncake] and the system's libnuma1 and libibverbs1: {missing}"
    ) from missing

logger = logging.getLogger(__name__)

# Codes of the native client.
_OK = 0
_NO_CODE = -1  # not a native code: the answer has the wrong number of codes
_BAD_ARGUMENTS = -600
_NOT_FOUND = -704
_TRANSFER_FAILED = -800
_NO_MASTER = -900  # and below: the call to the master failed or timed out
_PRESENCE = {1: True, 0: False, _NOT_FOUND: False}  # other codes: unknown

_SMALLEST_SEGMENT_BYTES = 2**24
_WARM_UP_TRIES = 10
_WARM_UP_PAUSE_S = 1.0
_CLOSE_TIMEOUT_S = 75.0  # a transfer from a machine that hangs ends after 60 s
_BEACON = b"kvsight"
_CALL_TIMEOUT_MS = "MC_RPC_TIMEOUT_MS"


class StorageUnreachableError(KvsightError, ConnectionError):
    """The master of a Mooncake store does not answer or refuses the client. Contains its address."""

    retriable = True


class StorageRegistrationError(KvsightError, RuntimeError):
    """The store rejected a tensor of a host pool. Contains pool, address and code."""


class MasterState(Enum):
    """The result of a probe of the master."""

    SAME = "same"
    """It has kept its objects."""
    EMPTIED = "emptied"
    """It was restarted, or all objects were removed."""
    AWAY = "away"
    """It is unreachable."""


class MooncakeClient:
    """Connects in its constructor. Any thread.

    tp_size: ranks that share the memory of the settings. Raises StorageUnreachableError if the store cannot be reached
    or accepts no object, InvalidValueError for a segment size that it rejects, and StorageClosedError after `close()`.

    While the master is unreachable, calls write nothing and report every object as unknown. `probe` reconnects.
    """

    def __init__(self, settings: MooncakeSettings, *, tp_size: int = 1) -> None:
        self.address = settings.mooncake_master
        self.on_away: Callable[[], None] = lambda: None
        """Called on any thread when the master becomes unreachable."""
        self.on_transfer_failed: Callable[[], None] = lambda: None
        """Called on any thread when a machine that lends its memory did not answer."""
        self._connect_timeout_s = settings.mooncake_connect_timeout_s
        self._beacon = f"kvsight_{secrets.token_hex(8)}"
        self._idle = threading.Condition()  # guards the five below; notified when a call ends
        self._calls = 0
        self._closed = False
        self._ended = False
        self._away = False
        self._registered: set[int] = set()  # addresses
        self._has_beacon = False  # whether the object that disappears with the master's memory is stored
        self._native = MooncakeDistributedStore()
        self._connect(settings, tp_size)

    def exist(self, names: Sequence[str]) -> list[bool | None]:
        """Return whether each object is stored, or None if unknown."""
        return [_PRESENCE.get(code) for code in self._run(names, lambda: self._native.batch_is_exist(list(names)))]

    def put(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Return whether each object was written, or is being written by another client; only `exist` distinguishes
        the two. Stored objects keep their content.
        """
        codes = self._run(names, lambda: self._native.batch_put_from(list(names), list(addresses), list(sizes)))
        return [code == _OK for code in codes]

    def get(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[bool | None], list[bool]]:
        """Return whether each object was read (None if it was not, but may be stored), and whether it is stored with
        another length than requested. Memory of objects that were not read is undefined.
        """
        codes = self._run(names, lambda: self._native.batch_get_into(list(names), list(addresses), list(sizes)))
        odd = [self._is_odd(*each) for each in zip(names, codes, sizes, strict=True)]
        return [_was_read(*each) for each in zip(codes, sizes, odd, strict=True)], odd

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, even leased ones."""
        self._run(names, lambda: self._native.batch_remove(list(names), True))

    def remove_matching(self, pattern: str | None) -> None:
        """Remove objects whose whole names match, or all (None), even leased. Raises StorageUnreachableError."""
        with self._in_flight():
            code = self._native.remove_all(True) if pattern is None else self._native.remove_by_regex(pattern, True)
        if code < 0:
            raise StorageUnreachableError(f"Mooncake master {self.address} did not remove the pages: code {code}")

    def register(self, pool: str, address: int, num_bytes: int) -> None:
        """Register memory with the store. Raises StorageRegistrationError."""
        with self._in_flight():
            code = self._native.register_buffer(address, num_bytes)
        if code:
            text = f"pool {pool}: {num_bytes} bytes at {address:#x} were not registered with the store: code {code}"
            raise StorageRegistrationError(text)
        with self._idle:
            self._registered.add(address)

    def unregister(self, address: int) -> None:
        with self._in_flight():
            self._native.unregister_buffer(address)
        with self._idle:
            self._registered.discard(address)

    def probe(self) -> MasterState:
        """Check the state of the master, and resume calls if it is reachable again."""
        if self._away and not self._is_listening():
            return MasterState.AWAY
        with self._in_flight():
            (code,) = self._native.batch_is_exist([self._beacon])
        if code <= _NO_MASTER:
            self._lose_master()
            return MasterState.AWAY
        if self._away:
            logger.info("Mooncake master %s is reachable again", self.address)
            with self._idle:
                self._away = False
        if _PRESENCE.get(code) is not False:
            return MasterState.SAME
        with self._in_flight():
            is_put = self._native.put(self._beacon, _BEACON) == _OK
        had_beacon, self._has_beacon = self._has_beacon, is_put
        # without the beacon, changes went unseen: report them once it is stored again
        return MasterState.EMPTIED if had_beacon or is_put else MasterState.SAME

    def close(self) -> bool:
        """Wait for running calls and leave the store.

        Objects in the memory that this client lends are lost. False if a call does not end and may still use
        registered memory.
        """
        with self._idle:
            if self._closed:
                return self._ended
            self._closed = True
            idle = self._idle.wait_for(lambda: not self._calls, _CLOSE_TIMEOUT_S)
        if not idle:  # closing it during a call would crash the process
            logger.error("a call to Mooncake master %s does not end: its client is left open", self.address)
            return False
        if not self._away and self._is_listening():
            self._native.remove(self._beacon, True)
        for address in self._registered:
            self._native.unregister_buffer(address)
        self._native.close()
        self._ended = True
        return True

    def _run(self, names: Sequence[str], call: Callable[[], list[int]]) -> list[int]:
        """Return one code per name. While the master is unreachable, no call is made and all codes are `_NO_MASTER`."""
        with self._in_flight():
            if self._away or not names:
                return [_NO_MASTER] * len(names)
            codes = call()
        if len(codes) != len(names):
            logger.error("Mooncake answered %d names with %d codes", len(names), len(codes))
            return [_NO_CODE] * len(names)
        lowest = min(codes)
        if lowest <= _NO_MASTER:
            self._lose_master()
        elif _TRANSFER_FAILED in codes:
            self.on_transfer_failed()
        return codes

    def _is_odd(self, name: str, code: int, size: int) -> bool:
        """Return whether an object whose read returned `code` has another length than requested.

        The code for a longer object is also that of many other faults, so the store is queried for the length.
        """
        if code == size or (code < 0 and code != _BAD_ARGUMENTS):
            return False
        (length,) = self._run([name], lambda: [self._native.get_size(name)])
        return length >= 0 and length != size

    def _lose_master(self) -> None:
        with self._idle:
            known, self._away = self._away, True
        if not known:
            logger.warning("Mooncake master %s is unreachable", self.address)
            self.on_away()

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Keep the native client open until the block ends."""
        with self._idle:
            if self._closed:
                raise StorageClosedError
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _connect(self, settings: MooncakeSettings, tp_size: int) -> None:
        segment_bytes = settings.mooncake_segment_bytes // tp_size
        if 0 < segment_bytes < _SMALLEST_SEGMENT_BYTES:
            expected = f"0, or at least {_SMALLEST_SEGMENT_BYTES} for each of {tp_size} ranks"
            raise InvalidValueError("mooncake_segment_bytes", settings.mooncake_segment_bytes, expected)
        if not self._is_listening():
            text = f"no Mooncake master listens on {self.address} (waited {self._connect_timeout_s:g} s)"
            raise StorageUnreachableError(text)
        # the native client reads these at its first setup in a process
        wanted_ms = str(int(settings.mooncake_call_timeout_s * 1000))
        known_ms = os.environ.setdefault(_CALL_TIMEOUT_MS, wanted_ms)
        if known_ms != wanted_ms:
            text = "%s is %s in this process: a call timeout of %s ms is not applied"
            logger.warning(text, _CALL_TIMEOUT_MS, known_ms, wanted_ms)
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "2")
        code = self._native.setup(
            settings.mooncake_local_hostname,
            settings.mooncake_metadata_server,
            segment_bytes,
            settings.mooncake_buffer_bytes,
            settings.mooncake_protocol,
            settings.mooncake_devices,
            self.address,
        )
        if code:
            raise StorageUnreachableError(f"Mooncake master {self.address} refuses this client: code {code}")
        self._warm_up()

    def _warm_up(self) -> None:
        """Write and read an object, so that all connections exist before the first page."""
        for again in reversed(range(_WARM_UP_TRIES)):
            code = self._native.put(self._beacon, _BEACON)
            if code == _OK and self._native.get(self._beacon) == _BEACON:
                self._has_beacon = True
                return
            if again:
                time.sleep(_WARM_UP_PAUSE_S)  # other machines may still be lending their memory
        self._native.close()
        raise StorageUnreachableError(f"the Mooncake store of master {self.address} accepts no object: code {code}")

    def _is_listening(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), self._connect_timeout_s):
                return True
        except OSError:
            return False


def _was_read(code: int, size: int, is_odd: bool) -> bool | None:
    if code == size:
        return True
    return False if is_odd or code == _NOT_FOUND else None
