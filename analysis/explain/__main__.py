"""A process that explains one prompt: `python -m analysis.explain`, with a `Job` in msgpack on stdin.

It writes the explanation as JSON to stdout and ends with 0. If there is none, it writes a `Refusal` and ends with 2. A
service explains in a process of its own, because a replay in a thread would delay its answers.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from analysis.explain.asked_prompt import AskedPrompt
from analysis.explain.explanation import NothingToExplainError, explain
from analysis.explain.jobs import EXIT_REFUSED, Job, Refusal
from indexer.replay import Timeline, open_beginning
from indexer.settings import IndexerSettings
from kv_events.errors import KvsightError
from kv_events.http.explanations import Explanation
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.log.reader import RecordChunk, torn_tail
from kv_events.records import Channel
from kv_events.runtime.helper_process import become_helper, write_result


class _OutsideTheLogError(KvsightError):
    """The moment is before or behind the records of the log."""


def main() -> int:
    """Do one job. Returns the exit code."""
    become_helper(ends_with_stdin=False)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    signal.alarm(int(job.timeout_s) + 1)  # if the service has died
    prompt = job.prompt()
    try:
        answer: Explanation | Refusal = _explain(job, prompt)
    except _OutsideTheLogError as error:
        answer = Refusal(field="at", detail=str(error))
    except NothingToExplainError as error:
        answer = Refusal(field="model_name" if prompt.worker is None else "worker", detail=str(error))
    except (KvsightError, OSError) as error:
        answer = Refusal(field=None, detail=str(error))
    write_result(answer)
    return EXIT_REFUSED if isinstance(answer, Refusal) else 0


def _explain(job: Job, prompt: AskedPrompt) -> Explanation:
    log = Timeline(Path(job.folder))
    beginning = open_beginning(Path(job.folder), IndexerSettings())
    extent = LogExtent()  # of the events
    last: RecordChunk | None = None

    def chunks() -> Iterator[RecordChunk]:
        nonlocal last
        for chunk in log.chunks(log.first_index):
            last = chunk
            events = chunk._replace(rows=chunk.rows[chunk.channels == Channel.EVENTS])
            if len(events.rows):
                events.note_in(extent)
            yield chunk

    try:
        found = explain(prompt, chunks(), job.moment(), beginning.views)
    except NothingToExplainError as error:
        _check_moment(job.at, extent, error)
        raise
    _check_moment(job.at, extent)
    tail = torn_tail(Path(job.folder), last, log.damage)
    damage = [*log.damage, *filter(None, [beginning.fault, tail])]
    return msgspec.structs.replace(found, damage=list(map(str, damage)))


def _check_moment(at: float | None, extent: LogExtent, cause: Exception | None = None) -> None:
    if not extent.num_records:
        raise _OutsideTheLogError("the log has no record of events yet") from cause
    if outside := extent.fault(LogMoment(time_s=at)):
        raise _OutsideTheLogError(f"at: {at} is {outside}") from cause


if __name__ == "__main__":
    sys.exit(main())
