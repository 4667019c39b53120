"""A process that explains one prompt: `python -m analysis.explain`, whose job is an `ExplainJob`.

Its result is the explanation, or an `ExplainError`. See `kv_events.runtime.helper_process`.
"""

import logging
import sys
from pathlib import Path

import msgspec

from analysis.explain.asked_prompt import ExplainError, ExplainJob
from analysis.explain.decisions import decisions_beside
from analysis.explain.explanation import NothingToExplainError, explain
from indexer.replay import Timeline, open_beginning
from indexer.settings import IndexerSettings
from kv_events.errors import KvsightError
from kv_events.http.explanations import Explanation
from kv_events.log.moments import LogMoment
from kv_events.log.reader import torn_tail
from kv_events.runtime.helper_process import become_helper, write_result


def main() -> None:
    """Do one job."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=ExplainJob)
    logging.disable()  # of records, which the service does not log a second time
    become_helper()
    answer: Explanation | ExplainError
    try:
        answer = _explain(job)
    except NothingToExplainError as error:
        answer = ExplainError(field="model_name" if job.prompt.worker is None else "worker", detail=str(error))
    except (KvsightError, OSError) as error:
        answer = ExplainError(detail=str(error))
    write_result(answer)


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
    main()
