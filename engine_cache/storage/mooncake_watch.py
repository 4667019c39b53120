"""Looks after a Mooncake store, so that what is told of it stays true while nobody reads or writes."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from engine_cache.storage.base import StorageClosedError
from engine_cache.storage.mooncake_client import MasterState, MooncakeClient

log = logging.getLogger(__name__)

_LENDER_TTL_S = 15.0
"""After so long the master has dropped what lay on a machine that died (10 s unless told otherwise)."""
_STOP_TIMEOUT_S = 10.0


class MooncakeWatch:
    """A thread that probes the master every `interval_s` seconds.

    look_again: asks the store for every page that is told to be there. Called on the watch's thread when the master
    came back or lost its memory, and some time after a machine that lends memory did not answer.
    """

    def __init__(self, client: MooncakeClient, interval_s: float, look_again: Callable[[], None]) -> None:
        self._client = client
        self._interval_s = interval_s
        self._look_again = look_again
        self._is_emptied = False  # and was not looked at since; the thread's own
        self._lock = threading.Lock()  # guards what follows
        self._suspicious_until: float | None = None  # monotonic time of the look that is due
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mooncake-watch:{client.address}", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread in a native call does not survive the end of the interpreter

    def suspect(self) -> None:
        """A machine did not answer: look again when the master must have noticed. Any thread."""
        with self._lock:
            self._suspicious_until = time.monotonic() + _LENDER_TTL_S

    def stop(self) -> None:
        """End the thread, with the call it is in."""
        self._ended.set()
        self._thread.join(_STOP_TIMEOUT_S)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._look()
            except StorageClosedError:
                return
            except Exception:
                log.exception("looking after Mooncake master %s failed", self._client.address)

    def _look(self) -> None:
        state = self._client.probe()
        self._is_emptied |= state is MasterState.EMPTIED
        due = self._suspicious_until
        is_due = due is not None and time.monotonic() > due
        if state is MasterState.AWAY or not (is_due or self._is_emptied):
            return
        self._look_again()  # if that fails, it is as due as before
        self._is_emptied = False
        with self._lock:
            if is_due and self._suspicious_until == due:  # else a machine did not answer meanwhile
                self._suspicious_until = None
