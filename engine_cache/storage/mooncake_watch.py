"""Monitoring of a Mooncake store, so that announced pages are withdrawn even while no page is read or written."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from engine_cache.storage.base import StorageClosedError
from engine_cache.storage.mooncake_client import MasterState, MooncakeClient

logger = logging.getLogger(__name__)

_LENDER_TTL_S = 15.0
"""Time after which the master has dropped the objects of a machine that died (10 s by default)."""
_STOP_TIMEOUT_S = 10.0


class MooncakeWatch:
    """A thread that probes the master every `interval_s` seconds.

    look_again: looks up all held pages. Called on the watch's thread when the master is back or has lost its objects,
    and `_LENDER_TTL_S` after a machine that lends memory did not answer.
    """

    def __init__(self, client: MooncakeClient, interval_s: float, look_again: Callable[[], None]) -> None:
        self._client = client
        self._interval_s = interval_s
        self._look_again = look_again
        self._is_emptied = False  # the store was emptied and no lookup has run since; watch thread only
        self._lock = threading.Lock()  # guards the fields below
        self._suspicious_until: float | None = None  # monotonic time at which a lookup is due
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mooncake-watch:{client.address}", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a native call must not run at interpreter exit

    def suspect(self) -> None:
        """Report that a machine did not answer. Schedules a lookup for when the master has noticed. Any thread."""
        with self._lock:
            self._suspicious_until = time.monotonic() + _LENDER_TTL_S

    def stop(self) -> None:
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
                logger.exception("looking after Mooncake master %s failed", self._client.address)

    def _look(self) -> None:
        state = self._client.probe()
        self._is_emptied |= state is MasterState.EMPTIED
        due = self._suspicious_until
        is_due = due is not None and time.monotonic() > due
        if state is MasterState.AWAY or not (is_due or self._is_emptied):
            return
        self._look_again()  # stays due if this raises
        self._is_emptied = False
        with self._lock:
            if is_due and self._suspicious_until == due:  # otherwise another machine did not answer
                self._suspicious_until = None
