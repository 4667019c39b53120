"""Copy engines: they run jobs in lanes and report their progress through tickets. No torch.

A job is a sequence of steps. Jobs of one lane run one after another; lanes run concurrently. Engines do not know what a
step copies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from operator import call
from threading import Condition
from typing import NamedTuple, Protocol

from engine_cache.errors import TransferError

logger = logging.getLogger(__name__)

Step = Callable[[], None]


class Lane(Enum):
    """Queues of jobs that do not wait for each other."""

    WRITE = "write"
    """Device to host."""
    LOAD = "load"
    """Host to device."""
    PREFETCH = "prefetch"
    """Storage to host."""
    ARCHIVE = "archive"
    """Host to storage."""


class Ticket:
    """Progress of one job. Any thread."""

    def __init__(self, num_steps: int) -> None:
        self.error: Exception | None = None
        """The exception that ended the job, if any."""
        self._num_steps = num_steps
        self._num_done = 0
        self._changed = Condition()  # guards changes of the fields above

    def query(self) -> bool:
        """Return whether the job has ended, successfully or not."""
        return self.error is not None or self._num_done == self._num_steps

    def synchronize(self) -> None:
        """Wait until the job has ended."""
        with self._changed:
            self._changed.wait_for(self.query)

    def wait_for_step(self, step: int) -> None:
        """Wait until steps `0 .. step` are done. Raises TransferError if the job failed before that."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._num_done > step)
            if self._num_done <= step:
                raise TransferError(f"step {step} of {self._num_steps} failed: {self.error}") from self.error

    def run(self, steps: Sequence[Step], run_step: Callable[[Step], None]) -> None:
        """Run the job on this thread. A step that raises is retried once; if it raises again, the job has failed."""
        for step in steps:
            error = None
            try:
                _try_twice(step, run_step)
            except Exception as raised:
                logger.exception("a copy failed twice, after %d of %d steps", self._num_done, self._num_steps)
                error = raised
            with self._changed:
                self._num_done += error is None
                self.error = error
                self._changed.notify_all()
            if error is not None:
                return


def _try_twice(step: Step, run_step: Callable[[Step], None]) -> None:
    try:
        run_step(step)
    except Exception:
        logger.warning("a copy failed and is tried again", exc_info=True)
        run_step(step)


class CopyEngine(Protocol):
    """Runs jobs. `submit` may be called from inside a job; other methods belong to the cache's thread."""

    def submit(self, lane: Lane, steps: Sequence[Step]) -> Ticket:
        """Queue a job in its lane and return at once."""

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no job is queued or running, including jobs submitted by jobs. False after the timeout."""

    def close(self) -> None:
        """Drain and end the threads. The engine accepts no jobs afterwards."""


class ThreadCopyEngine:
    """One thread per lane, started by its first job."""

    def __init__(self) -> None:
        self._threads = {lane: ThreadPoolExecutor(1, f"kvsight-copy-{lane.value}") for lane in Lane}
        self._idle = Condition()  # guards _num_open
        self._num_open = 0

    def submit(self, lane: Lane, steps: Sequence[Step]) -> Ticket:
        ticket = Ticket(len(steps))
        with self._idle:
            self._num_open += 1
        try:
            self._threads[lane].submit(self._run, ticket, steps, self._step_runner(lane))
        except RuntimeError:  # closed, or no thread could be started
            self._end_job()
            raise
        return ticket

    def drain(self, timeout_s: float | None = None) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self._num_open == 0, timeout_s)

    def close(self) -> None:
        self.drain()
        for thread in self._threads.values():
            thread.shutdown()

    def _step_runner(self, lane: Lane) -> Callable[[Step], None]:
        """Return the function that runs each step of a job. Called on the submitting thread."""
        return call

    def _run(self, ticket: Ticket, steps: Sequence[Step], run_step: Callable[[Step], None]) -> None:
        ticket.run(steps, run_step)
        self._end_job()

    def _end_job(self) -> None:
        with self._idle:
            self._num_open -= 1
            self._idle.notify_all()


class ManualCopyEngine:
    """Runs jobs on demand on the calling thread. Waiting for a ticket runs the jobs of its lane up to its own."""

    def __init__(self) -> None:
        self._queued: deque[_Job] = deque()

    def submit(self, lane: Lane, steps: Sequence[Step]) -> Ticket:
        ticket = _ManualTicket(len(steps), self)
        self._queued.append(_Job(lane, steps, ticket))
        return ticket

    def num_queued(self, lane: Lane) -> int:
        return sum(job.lane is lane for job in self._queued)

    def step(self, lane: Lane, position: int = 0) -> bool:
        """Run the queued job at `position` of the lane, 0 for the oldest. False if there is none."""
        jobs = [job for job in self._queued if job.lane is lane]
        if position >= len(jobs):
            return False
        self._run(jobs[position])
        return True

    def run_up_to(self, ticket: Ticket) -> None:
        while (job := next((job for job in self._queued if job.ticket is ticket), None)) is not None:
            self.step(job.lane)

    def drain(self, timeout_s: float | None = None) -> bool:
        while self._queued:
            self._run(self._queued[0])
        return True

    def close(self) -> None:
        self.drain()

    def _run(self, job: _Job) -> None:
        self._queued.remove(job)
        job.ticket.run(job.steps, call)


class _Job(NamedTuple):
    lane: Lane
    steps: Sequence[Step]
    ticket: Ticket


class _ManualTicket(Ticket):
    def __init__(self, num_steps: int, engine: ManualCopyEngine) -> None:
        super().__init__(num_steps)
        self._engine = engine

    def synchronize(self) -> None:
        self._engine.run_up_to(self)

    def wait_for_step(self, step: int) -> None:
        self._engine.run_up_to(self)
        super().wait_for_step(step)
