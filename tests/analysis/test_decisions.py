"""Decisions of a log in the order of their times."""

from contextlib import closing
from pathlib import Path
from random import Random

from analysis.audit.audit import SortedDecisions
from kv_events.decisions import VERSION, Outcome, encode_decision
from kv_events.log.event_log import EventLogWriter
from kv_events.records import Channel, LogRecord

NUM_DECISIONS = 3000


def outcome(number: int, time_s: float) -> LogRecord:
    name = f"r{number}" + "x" * (number % 200)
    payload = encode_decision(Outcome(VERSION, name, time_s, number))
    return LogRecord(0, number, 1_000_000, name.encode(), payload, Channel.DECISIONS)


def test_decisions_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    random = Random(1)
    times = [1_700_000_000 + random.randrange(500) / 10 for _ in range(NUM_DECISIONS)]
    with EventLogWriter(tmp_path) as log, EventLogWriter(tmp_path / "decisions") as beside:
        for number, time_s in enumerate(times):
            (beside if number % 3 == 0 else log).append(outcome(number, time_s))
        log.append(LogRecord(0, 0, 1, b"", b"garbage", Channel.DECISIONS))
    middle_ms = 1_700_000_000_000 + 20_000
    with closing(SortedDecisions(tmp_path)) as decisions:
        assert (len(decisions), decisions.unreadable, decisions.damage) == (NUM_DECISIONS, 1, [])
        first = [each.timestamp for each in decisions.before(middle_ms, 0)]
        rest = [each.timestamp for each in decisions.rest()]
        assert [*first, *rest] == sorted(times)
        assert first[-1] * 1000 <= middle_ms <= rest[0] * 1000
        assert not list(decisions.rest())
