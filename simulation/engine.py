"""The time that an engine needs: steps of a continuous batch with chunked prefill.

    waiting ── begin ──> prefill, in chunks ── first token ──> decode, a token a step ── end

A step generates one token for each request in decode and computes prompt tokens with what is left of its budget, first
come, first served. A request gets rows for its whole output when it begins, so that none is preempted.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from simulation.settings import EngineSettings, Seconds
from simulation.worker import Running, SimulatedWorker
from simulation.workload import Request


@dataclass(slots=True, eq=False)
class Job:
    """A request in the batch of an engine."""

    request: Request
    request_id: str
    running: Running
    computed: int
    """Tokens of the prompt that are in cache or computed."""
    remaining: int
    """Tokens to generate."""
    first_token_at: float = 0.0


class Engine:
    """The queue and the batch of one worker. The caller has a clock: it starts a step, and finishes it at `ends_at`.

    Steps without prompt tokens are taken together until a request ends or one arrives.
    """

    def __init__(self, worker: SimulatedWorker, settings: EngineSettings) -> None:
        self._worker = worker
        self._settings = settings
        self._waiting = deque[tuple[Request, str]]()
        self._prefill: list[Job] = []
        self._decode: list[Job] = []
        self._context = 0  # tokens, of all requests in decode
        self._chunks: list[tuple[Job, int]] = []
        self._steps: Seconds = np.zeros(0)
        self._started_at = 0.0
        self.ends_at: float | None = None
        """End of the current steps. None: nothing to do."""
        self.gaps: list[tuple[Seconds, int]] = []
        """Times between the tokens of a request, and the number of requests for which they count."""

    def add(self, request: Request, request_id: str, now: float) -> None:
        """Queue a request. It takes part in the next step."""
        self._waiting.append((request, request_id))
        if self.ends_at is None:
            self.start(now)
        elif len(self._steps) > 1:
            ends = self._started_at + np.cumsum(self._steps)
            self._take_steps(self._steps[: np.searchsorted(ends, now) + 1])

    def start(self, now: float) -> None:
        """Plan the next step."""
        self._started_at = now
        self._chunks = self._plan()
        num_steps = 1 if self._chunks else min((job.remaining for job in self._decode), default=0)
        steps = np.zeros(num_steps)
        if self._decode:
            steps = self._settings.decode_seconds(len(self._decode), self._context, num_steps)
        if self._chunks:
            steps += self._settings.prefill_seconds([(job.computed, tokens) for job, tokens in self._chunks])
        self._take_steps(steps)

    def finish(self) -> tuple[list[Job], list[Job]]:
        """Complete the current steps. Returns the requests with a first token, and those that have ended.

        The pages that were computed are in the cache and published.
        """
        num_steps, num_decode = len(self._steps), len(self._decode)
        if num_decode:
            self.gaps.append((self._steps, num_decode))
        self._context += num_steps * num_decode
        for job in self._decode:
            job.remaining -= num_steps
        assert self.ends_at is not None, "a step was planned"
        for job, tokens in self._chunks:
            job.computed += tokens
            self._worker.extend(job.running, job.computed)
        complete = [job for job, _ in self._chunks if job.computed == len(job.request.token_ids)]
        for job in complete:
            job.first_token_at = self.ends_at
            job.remaining -= 1
            self._context += job.computed
        self._prefill = [job for job in self._prefill if job not in complete]
        batch = self._decode + complete
        self._decode = [job for job in batch if job.remaining]
        ended = [job for job in batch if not job.remaining]
        for job in ended:
            self._end(job)
        return complete, ended

    def _take_steps(self, steps: Seconds) -> None:
        self._steps = steps
        self.ends_at = self._started_at + float(np.cumsum(steps)[-1]) if len(steps) else None

    def _plan(self) -> list[tuple[Job, int]]:
        """Return the prompt tokens of the next step, by request, after admitting what waits and fits."""
        budget, chunks = self._settings.max_batch_tokens - len(self._decode), list[tuple[Job, int]]()
        while budget > 0:
            number = len(chunks)
            if number == len(self._prefill) and not self._admit():
                break
            job = self._prefill[number]
            tokens = min(budget, len(job.request.token_ids) - job.computed)
            chunks.append((job, tokens))
            budget -= tokens
        return chunks

    def _admit(self) -> bool:
        if not self._waiting or len(self._prefill) + len(self._decode) >= self._settings.max_requests:
            return False
        request, request_id = self._waiting[0]
        running = self._worker.begin(request, request.num_output - len(request.output_tokens))
        if running is None:
            return False
        self._waiting.popleft()
        # the last token of a prompt gives the first one of the output
        computed = max(0, min(running.found_tokens, len(request.token_ids) - 1))
        self._prefill.append(Job(request, request_id, running, computed, request.num_output))
        return True

    def _end(self, job: Job) -> None:
        num_output = job.request.num_output
        self._context -= job.computed + num_output - 1
        self._worker.extend(job.running, job.computed + num_output)
        self._worker.end(job.running)
