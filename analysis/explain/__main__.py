"""A process that explains one prompt: `python -m analysis.explain`, with an `ExplainJob` in msgpack on stdin.

It writes the explanation as JSON to stdout and ends with 0. If there is none, it writes an `ExplainError` and ends with
2. A service explains in a process of its own, because a replay in a thread would delay its answers.
"""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from analysis.explain.asked_prompt import EXIT_REFUSED, ExplainError, ExplainJob
from analysis.explain.explanation import NothingToExplainError, explain
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
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ExplainJob)
    signal.alarm(int(job.timeout_s) + 1)  # if the service has died
    try:
        answer: Explanation | ExplainError = _explain(job)
    except _OutsideTheLogError as error:
        answer = ExplainError(field="at", detail=str(error))
    except NothingToExplainError as error:
        answer = ExplainError(field="model_name" if job.prompt.worker is None else "worker", detail=str(error))
    except (KvsightError, OSError) as error:
        answer = ExplainError(field=None, detail=str(error))
    write_result(answer)
    return EXIT_REFUSED if isinstance(answer, ExplainError) else 0


def _explain(job: ExplainJob) -> Explanation:
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
        found = explain(job.prompt, chunks(), job.moment, beginning.views)
    except NothingToExplainError:
        _check_moment(job.moment.time_s, extent)
        raise
    _check_moment(job.moment.time_s, extent)
    tail = torn_tail(Path(job.folder), last, log.damage)
    damage = [*log.damage, *filter(None, [beginning.fault, tail])]
    return msgspec.structs.replace(found, damage=list(map(str, damage)))


def _check_moment(at: float | None, extent: LogExtent) -> None:
    if not extent.num_records:
        raise _OutsideTheLogError("the log has no record of events yet")
    if outside := extent.fault(LogMoment(time_s=at)):
        raise _OutsideTheLogError(f"at: {at} is {outside}")


if __name__ == "__main__":
    sys.exit(main())
