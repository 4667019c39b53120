"""The parent of the processes of one service: starts them, replaces those that end, and ends them all.

It forks them after it has imported and compiled everything. So the processes share that memory, kernels are compiled
once, and a replacement starts in milliseconds. The parent itself has no event loop and no thread.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from typing import Final

from api.replicas.replica import Replica, SharedState, is_orphan
from kv_events.backoff import pause_s
from kv_events.errors import KvsightError

logger = logging.getLogger(__name__)

EXIT_FAILED: Final = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STABLE_S = 10.0
_POLL_S = 0.02
_STOP_S = 30.0
_LOOK_S = 1.0
_HUNG_S = 15.0
_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets at the end of its parent
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_fork = multiprocessing.get_context("fork")


@dataclass
class _Slot:
    """The process of one number."""

    process: ForkProcess | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    """When it is to be started, if there is none."""
    num_failures: int = 0


class Supervisor:
    """Runs `count` processes until a signal comes."""

    def __init__(self, shared: SharedState, run: Callable[[Replica], None], on_listening: Callable[[], None]) -> None:
        """run: is called in each process and serves until SIGTERM. on_listening: when the first one does."""
        self._shared = shared
        self._run = run
        self._on_listening = on_listening
        self._slots = [_Slot() for _ in range(shared.count)]
        self._has_listened = False
        self._received: list[int] = []
        self._kill_at = float("inf")
        self._looked_at = self._watches_since = time.monotonic()

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM, and return which one came.

        All processes end on the first signal, and at once on the second one. Exits with the code of the
        first process if it fails before it serves.
        """
        with self._signals() as woken:
            try:
                self._supervise(woken)
            finally:
                self._end_all()  # none is left, unless this fails
        return self._received[0]

    def _supervise(self, woken: socket.socket) -> None:
        while not self._received or self._alive():
            if not self._received:
                self._start_due()
                self._kill_hung()
            wait([woken, *(each.sentinel for each in self._alive())], self._timeout_s())
            self._drain(woken)
            for number, slot in enumerate(self._slots):
                if slot.process is not None and slot.process.exitcode is not None:
                    self._note_end(number, slot, slot.process.exitcode)
            self._end_if_asked()

    def _start_due(self) -> None:
        if not self._has_listened and self._shared.is_serving(0):
            self._has_listened = True
            self._on_listening()
        now = time.monotonic()
        # the first one alone, so that a mistake in the settings shows once
        for number, slot in enumerate(self._slots if self._has_listened else self._slots[:1]):
            is_last = not self._alive() and slot.started_at + 2 * _FIRST_PAUSE_S <= now
            if slot.process is None and (is_last or slot.start_at <= now):
                self._start(number, slot)

    def _start(self, number: int, slot: _Slot) -> None:
        slot.started_at = time.monotonic()
        process = _fork.Process(target=self._child, args=(number, os.getpid()), name=f"kvsight-{number}")
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a new process has the parent's handlers at first
        try:
            process.start()
        except OSError as error:  # no memory, or too many processes
            pause = self._postpone(slot)
            logger.error("process %d cannot be started: %s; trying again in %.1f s", number, error, pause)  # noqa: TRY400
        else:
            slot.process = process
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _kill_hung(self) -> None:
        """Kill processes that serve, but whose event loop does not run. Time in which the parent itself did not run
        does not count: the whole service may have been paused.
        """
        now = time.monotonic()
        if now - self._looked_at > _HUNG_S / 2:
            self._watches_since = now
        self._looked_at = now
        for number, slot in enumerate(self._slots):
            if slot.process is not None and self._shared.is_serving(number):
                silent_s = now - max(self._watches_since, self._shared.alive_at(number))
                if silent_s > _HUNG_S:
                    logger.error("process %d hangs for %.0f s and is killed", number, silent_s)
                    slot.process.kill()
                    self._shared.note_ended(number)

    def _timeout_s(self) -> float:
        """Return the seconds until something is to be looked at."""
        if not self._has_listened and not self._received:
            return _POLL_S
        due = [] if self._received else [slot.start_at for slot in self._slots if slot.process is None]
        return min(_LOOK_S, max(0.0, min(due, default=float("inf")) - time.monotonic()))

    def _note_end(self, number: int, slot: _Slot, exit_code: int) -> None:
        assert slot.process is not None
        pid, slot.process = slot.process.pid, None
        self._shared.note_ended(number)
        if self._received:
            return
        if not self._has_listened:
            sys.exit(exit_code if exit_code > 0 else EXIT_FAILED)
        pause = self._postpone(slot)
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        logger.error("process %d (pid %s) ended by %s; it starts again in %.1f s", number, pid, how, pause)

    def _postpone(self, slot: _Slot) -> float:
        """Return the seconds after which a process is started again. They grow if it fails soon after its start."""
        if time.monotonic() - slot.started_at > _STABLE_S:
            slot.num_failures = 0
        pause = pause_s(slot.num_failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S) if slot.num_failures else 0.0
        slot.num_failures += 1
        slot.start_at = time.monotonic() + pause
        return pause

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end_if_asked(self) -> None:
        if not self._received:
            return
        now = time.monotonic()
        if self._kill_at == float("inf"):
            self._kill_at = now + _STOP_S
            for process in self._alive():
                process.terminate()
        if len(self._received) > 1 or now >= self._kill_at:
            self._kill_at = now + _STOP_S
            for process in self._alive():
                logger.warning("%s is killed", process.name)
                process.kill()

    def _end_all(self) -> None:
        for process in self._alive():
            process.terminate()
        for process in self._alive():
            process.join(_STOP_S)
            process.kill()
            process.join()

    def _alive(self) -> list[ForkProcess]:
        return [slot.process for slot in self._slots if slot.process is not None]

    @contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """Collect signals inside the block. Yields what can be read when one has come."""
        woken, wakes = socket.socketpair()
        woken.setblocking(False)
        wakes.setblocking(False)
        before = {number: signal.signal(number, self._note_signal) for number in _SIGNALS}
        with woken, wakes:
            signal.set_wakeup_fd(wakes.fileno())
            try:
                yield woken
            finally:
                signal.set_wakeup_fd(-1)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _note_signal(self, number: int, _frame: object) -> None:
        self._received.append(number)

    @staticmethod
    def _drain(woken: socket.socket) -> None:
        try:
            woken.recv(64)
        except BlockingIOError:
            return

    # --- in the process ---------------------------------------------------------------------------------------------

    def _child(self, number: int, parent_pid: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which then sends SIGTERM
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if is_orphan(parent_pid):
            return
        try:
            self._run(Replica(number, self._shared))
        except (KvsightError, OSError) as error:
            sys.stderr.write(f"kvsight: process {number}: {error}\n")
            sys.exit(EXIT_FAILED)
        finally:
            if is_orphan(parent_pid):  # nobody else removes it
                shutil.rmtree(self._shared.folder, ignore_errors=True)
