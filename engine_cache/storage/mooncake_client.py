"""A Mooncake store as the storage tier wants it: a client that answers in bounded time whatever becomes of the master.

The native client crashes the process when it is used after its end, blocks for seconds in every call while the master
is away, and answers with codes. This one refuses calls after `close()`, answers at once while it knows the master to be
away, and tells success, absence and loss apart. No torch: memory is known by address.
"""

from __future__ import annotations

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

log = logging.getLogger(__name__)

# Codes of the native client.
_OK = 0
_NO_CODE = -1  # our own: the answer has another length than the question, so it says nothing of any name
_BAD_ARGUMENTS = -600
_NOT_FOUND = -704
_TRANSFER_FAILED = -800
_NO_MASTER = -900  # and below: the call to the master failed, timed out, ...
_PRESENCE = {1: True, 0: False, _NOT_FOUND: False}  # any other code says nothing of the object

_SMALLEST_SEGMENT_BYTES = 2**24
_WARM_UP_TRIES = 10
_WARM_UP_PAUSE_S = 1.0
_CLOSE_TIMEOUT_S = 75.0  # a transfer from a machine that stands still ends after 60 s
_BEACON = b"kvsight"
_CALL_TIMEOUT_MS = "MC_RPC_TIMEOUT_MS"


class StorageUnreachableError(KvsightError, ConnectionError):
    """The master of a Mooncake store does not answer, or refuses. Names its address."""

    retriable = True


class StorageRegistrationError(KvsightError, RuntimeError):
    """The store does not take a tensor of a host pool. Names pool, address and code."""


class MasterState(Enum):
    """What a look at the master finds."""

    SAME = "same"
    """It knows what it was told."""
    EMPTIED = "emptied"
    """It was started anew, or somebody removed everything: nothing is sure to be there any more."""
    AWAY = "away"


class MooncakeClient:
    """Connects at once. Any thread. Raises StorageUnreachableError if the store cannot be reached or takes nothing,
    InvalidValueError for a segment that it would not take, StorageClosedError after `close()`.

    tp_size: ranks that share the memory of the settings.

    Calls that fail because of the master, or are not begun because it is away, write nothing and tell of no object
    whether it is there. `probe` finds it again.
    """

    def __init__(self, settings: MooncakeSettings, *, tp_size: int = 1) -> None:
        self.address = settings.mooncake_master
        self.on_away: Callable[[], None] = lambda: None
        """Called, from any thread, when the master went away."""
        self.on_transfer_failed: Callable[[], None] = lambda: None
        """Called, from any thread, when a machine that lends its memory did not answer."""
        self._connect_timeout_s = settings.mooncake_connect_timeout_s
        self._beacon = f"kvsight_{secrets.token_hex(8)}"
        self._idle = threading.Condition()  # guards the five below; notified when a call ends
        self._calls = 0
        self._closed = False
        self._ended = False
        self._away = False
        self._registered: set[int] = set()  # addresses
        self._has_beacon = False  # whether the object that tells one memory of the master from the next is there
        self._native = MooncakeDistributedStore()
        self._connect(settings, tp_size)

    def exist(self, names: Sequence[str]) -> list[bool | None]:
        """Whether each object is there; None: that was not told."""
        return [_PRESENCE.get(code) for code in self._run(names, lambda: self._native.batch_is_exist(list(names)))]

    def put(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Whether each object was written, or is being written by somebody else, which only `exist` tells apart. An
        object that is there keeps its content."""
        codes = self._run(names, lambda: self._native.batch_put_from(list(names), list(addresses), list(sizes)))
        return [code == _OK for code in codes]

    def get(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[bool | None], list[bool]]:
        """Whether each object was read, None: it was not, but may be there; and whether it is sure to be there with
        another length than asked for. The memory of what was not read is undefined."""
        codes = self._run(names, lambda: self._native.batch_get_into(list(names), list(addresses), list(sizes)))
        odd = [self._is_odd(*each) for each in zip(names, codes, sizes, strict=True)]
        return [_was_read(*each) for each in zip(codes, sizes, odd, strict=True)], odd

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, leased or not."""
        self._run(names, lambda: self._native.batch_remove(list(names), True))

    def remove_matching(self, pattern: str | None) -> None:
        """Remove every object whose whole name matches, leased or not; None: all there are. Raises
        StorageUnreachableError if that is not certain."""
        with self._in_flight():
            code = self._native.remove_all(True) if pattern is None else self._native.remove_by_regex(pattern, True)
        if code < 0:
            raise StorageUnreachableError(f"Mooncake master {self.address} did not remove the pages: code {code}")

    def register(self, pool: str, address: int, num_bytes: int) -> None:
        """Make memory known to the store, once. Raises StorageRegistrationError."""
        with self._in_flight():
            code = self._native.register_buffer(address, num_bytes)
        if code:
            text = f"pool {pool}: {num_bytes} bytes at {address:#x} were not registered with the store: code {code}"
            raise StorageRegistrationError(text)
        with self._idle:
            self._registered.add(address)

    def unregister(self, address: int) -> None:
        """Forget memory that was registered."""
        with self._in_flight():
            self._native.unregister_buffer(address)
        with self._idle:
            self._registered.discard(address)

    def probe(self) -> MasterState:
        """Look at the master; if it was away and is back, calls are made again from now on."""
        if self._away and not self._is_listening():
            return MasterState.AWAY
        with self._in_flight():
            (code,) = self._native.batch_is_exist([self._beacon])
        if code <= _NO_MASTER:
            self._lose_master()
            return MasterState.AWAY
        if self._away:
            log.info("Mooncake master %s is back", self.address)
            with self._idle:
                self._away = False
        if _PRESENCE.get(code) is not False:
            return MasterState.SAME
        with self._in_flight():
            is_put = self._native.put(self._beacon, _BEACON) == _OK
        had_beacon, self._has_beacon = self._has_beacon, is_put
        # what happened while it was missing nobody saw: that is told again once it is back
        return MasterState.EMPTIED if had_beacon or is_put else MasterState.SAME

    def close(self) -> bool:
        """Wait for the calls that run and leave the store, which keeps the objects unless they lie in the memory that
        this client lends. False: a call does not end, and may still use the memory that was registered."""
        with self._idle:
            if self._closed:
                return self._ended
            self._closed = True
            idle = self._idle.wait_for(lambda: not self._calls, _CLOSE_TIMEOUT_S)
        if not idle:  # ending it under a running call would end the process
            log.error("a call to Mooncake master %s does not end: its client is left open", self.address)
            return False
        if not self._away and self._is_listening():
            self._native.remove(self._beacon, True)
        for address in self._registered:
            self._native.unregister_buffer(address)
        self._native.close()
        self._ended = True
        return True

    # --- the native client ------------------------------------------------------------------------------------------

    def _run(self, names: Sequence[str], call: Callable[[], list[int]]) -> list[int]:
        """The code for each name, `_NO_MASTER` at once while the master is away."""
        with self._in_flight():
            if self._away or not names:
                return [_NO_MASTER] * len(names)
            codes = call()
        if len(codes) != len(names):
            log.error("Mooncake answered %d names with %d codes", len(names), len(codes))
            return [_NO_CODE] * len(names)
        lowest = min(codes)
        if lowest <= _NO_MASTER:
            self._lose_master()
        elif _TRANSFER_FAILED in codes:
            self.on_transfer_failed()
        return codes

    def _is_odd(self, name: str, code: int, size: int) -> bool:
        """Whether an object whose reading ended with that code has another length. An object that is longer answers
        with the code of many other faults: only the length that the store tells makes it sure."""
        if code == size or (code < 0 and code != _BAD_ARGUMENTS):
            return False
        (length,) = self._run([name], lambda: [self._native.get_size(name)])
        return length >= 0 and length != size

    def _lose_master(self) -> None:
        with self._idle:
            known, self._away = self._away, True
        if not known:
            log.warning("Mooncake master %s is away", self.address)
            self.on_away()

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        """The native client lives until the block ends."""
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
        # read by the native client when its first instance is set up
        wanted_ms = str(int(settings.mooncake_call_timeout_s * 1000))
        known_ms = os.environ.setdefault(_CALL_TIMEOUT_MS, wanted_ms)
        if known_ms != wanted_ms:
            text = "%s is %s in this process: a call timeout of %s ms is not applied"
            log.warning(text, _CALL_TIMEOUT_MS, known_ms, wanted_ms)
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
        """Write and read an object, so that the first page finds every connection made."""
        for again in reversed(range(_WARM_UP_TRIES)):
            code = self._native.put(self._beacon, _BEACON)
            if code == _OK and self._native.get(self._beacon) == _BEACON:
                self._has_beacon = True
                return
            if again:
                time.sleep(_WARM_UP_PAUSE_S)  # other machines may still be mounting their memory
        self._native.close()
        raise StorageUnreachableError(f"the Mooncake store of master {self.address} takes nothing: code {code}")

    def _is_listening(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), self._connect_timeout_s):
                return True
        except OSError:
            return False


def _was_read(code: int, size: int, is_odd: bool) -> bool | None:
    """As `MooncakeClient.get` tells it."""
    if code == size:
        return True
    return False if is_odd or code == _NOT_FOUND else None
