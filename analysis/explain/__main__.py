"""A process that explains one prompt: `python -m analysis.explain`, with an `ExplainJob` in msgpack on stdin.

It writes the explanation as JSON to stdout and ends with 0. If there is none, it writes an `ExplainError` and ends with
2. A service explains in a process of its own, because a replay in a thread would delay its answers.
"""

import signal
import sys
from pathlib import Path

import msgspec

from analysis.explain.asked_prompt import EXIT_REFUSED, ExplainError, ExplainJob
from analysis.explain.decisions import decisions_beside
from analysis.explain.explanation import NothingToExplainError, explain
from indexer.replay import Timeline, open_beginning
from indexer.settings import IndexerSettings
from kv_events.errors import KvsightError
from kv_events.http.explanations import Explanation
from kv_events.log.moments import LogMoment
from kv_events.log.reader import torn_tail
from kv_events.runtime.helper_process import become_helper, write_result


def main() -> int:
    """Do one job. Returns the exit code."""
    become_helper(ends_with_stdin=False)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ExplainJob)
    signal.alarm(int(job.timeout_s) + 1)  # if the service has died
    try:
        answer = _explain(job)
    except NothingToExplainError as error:
        answer = ExplainError(field="model_name" if job.prompt.worker is None else "worker", detail=str(error))
    except (KvsightError, OSError) as error:
        answer = ExplainError(field=None, detail=str(error))
    write_result(answer)
    return EXIT_REFUSED if isinstance(answer, ExplainError) else 0


def _explain(job: ExplainJob) -> Explanation | ExplainError:
    folder, at = Path(job.folder), job.moment.time_s
    log = Timeline(folder)
    if outside := log.extent.fault(LogMoment(time_s=at)):
        return ExplainError(field="at", detail="the log has no record yet" if at is None else f"at: {at} is {outside}")
    beginning = open_beginning(folder, IndexerSettings())
    chunks = log.chunks(log.first_index)
    found = explain(job.prompt, chunks, job.moment, beginning.views, decisions_beside(folder))
    damage = [*log.damage, *filter(None, [beginning.fault, torn_tail(folder)])]
    return msgspec.structs.replace(found, damage=list(map(str, damage)))


if __name__ == "__main__":
    sys.exit(main())
