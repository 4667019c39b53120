"""The funnel of an audit, the decisions of a log in the order of their times, and what an audit collects over time."""

import random
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest

from analysis.audit import curves as facts
from analysis.audit.audit import SortedDecisions, audit_log
from analysis.audit.curves import AuditCurves
from analysis.audit.decision_audit import HELD
from analysis.audit.report import AuditReport, Loss
from analysis.curves import MOST_BINS, Levels, Sums, TimeBins
from analysis.kernels.residency import COUNT_NAMES
from kv_events.decisions import VERSION, Outcome, encode_decision
from kv_events.log.event_log import EventLogWriter
from kv_events.records import Channel, LogRecord
from simulation import SimulationSettings, WorkloadSettings, generate, simulate
from tests.support.effort import num_examples
from tests.support.log.deciding_fleet import DecidingFleet
from tests.support.log.faulty_run import faulty_run
from tests.support.log.late_log import write_late_log, write_log
from tests.support.log.records import Stream, stored


def tokens(losses: list[Loss]) -> dict[tuple[str, str], int]:
    return {(each.step, each.cause): each.tokens for each in losses}


@pytest.mark.random_cases
@pytest.mark.parametrize("seed", range(num_examples(20)))
def test_every_number_and_every_cause_is_the_true_one(tmp_path: Path, seed: int) -> None:
    fleet = DecidingFleet(tmp_path, seed)
    fleet.decide(150)
    funnel = audit_log(tmp_path).funnel
    assert funnel is not None
    assert funnel.steps == fleet.steps
    assert tokens(funnel.losses) == +fleet.losses
    assert tokens(funnel.gains) == +fleet.gains
    for loss in (*funnel.losses, *funnel.gains):
        assert loss.share == loss.tokens / funnel.prompt_tokens
        assert len(loss.examples) == min(3, loss.requests)
        assert loss.examples[0].tokens == max(each.tokens for each in loss.examples)


def test_every_cause_occurs(tmp_path: Path) -> None:
    fleet = DecidingFleet(tmp_path, 1)
    fleet.decide(600)
    causes = {cause for _, cause in +fleet.losses}
    assert causes == {
        "load", "router did not ask", "stale view", "evicted before arrival", "engine's own reason", "hash mismatch",
        "not computed before", "evicted before", "no whole page", "no outcome known",
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["overlap-load", "random"])
def test_a_recorded_simulation_has_the_funnel_of_its_report(tmp_path: Path, policy: str) -> None:
    settings = SimulationSettings(workers=3, capacity_tokens=16_384, event_log_dir=tmp_path)
    (report,) = simulate(generate(WorkloadSettings(num_requests=120)), settings, [policy])
    funnel = audit_log(tmp_path / policy).funnel
    assert funnel is not None
    assert (funnel.requests, funnel.outcomes) == (120, 120)
    assert (funnel.prompt_tokens, funnel.delivered) == (report.prompt_tokens, report.found_tokens)
    if policy == "overlap-load":  # the events of each request are applied before the next one
        assert funnel.held_by_chosen == funnel.predicted == funnel.delivered
        assert {each.cause for each in funnel.losses if each.step != HELD} <= {"load"}
    else:
        assert funnel.predicted == 0
        assert {each.cause for each in funnel.losses if each.step != HELD} == {"router did not ask"}


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
    with closing(SortedDecisions(tmp_path, lambda _: None)) as decisions:
        assert (len(decisions), decisions.unreadable, decisions.damage) == (NUM_DECISIONS, 1, [])
        first = [each.timestamp for each in decisions.before(middle_ms, 0) if isinstance(each, Outcome)]
        rest = [each.timestamp for each in decisions.rest() if isinstance(each, Outcome)]
        assert [*first, *rest] == sorted(times)
        assert first[-1] * 1000 <= middle_ms <= rest[0] * 1000
        assert not list(decisions.rest())


def audited(folder: Path) -> tuple[AuditReport, AuditCurves]:
    series = AuditCurves()
    return audit_log(folder, series=series), series


def test_the_curves_of_a_faulty_run_add_up_to_its_report(tmp_path: Path) -> None:
    write_log(tmp_path, faulty_run(random.Random(7), 1500))
    report, series = audited(tmp_path)
    pages = series.pages.values.sum(axis=0).reshape(len(COUNT_NAMES), 4).tolist()
    assert dict(zip(COUNT_NAMES, pages, strict=True)) == report.pages
    held = series.tiers.values[series.bins.shown][-1]
    assert int(held.sum()) == sum(each.pages_held for each in report.streams) > 0
    for worker, levels in series.workers.items():
        last = int(levels.values[series.bins.shown][-1, 0])
        assert last == sum(each.pages_held for each in report.streams if each.worker == worker)
    assert series.batches.values.sum() == sum(each.batches for each in report.streams)
    gaps = [mark for mark in series.marks if mark.kind == facts.GAP]
    assert len(gaps) == sum(each.gaps for each in report.streams)
    assert {mark.kind for mark in series.marks} == {"gap", "restart", "wrong digest", "resync", "stale", "syncing"}


def test_the_curves_of_decisions_add_up_to_the_funnel(tmp_path: Path) -> None:
    DecidingFleet(tmp_path, 3).decide(120)
    report, series = audited(tmp_path)
    funnel = report.funnel
    assert funnel is not None
    sums = series.requests.values.sum(axis=0)
    assert sums[[facts.PROMPT, facts.FLEET, facts.CHOSEN, facts.PREDICTED, facts.DELIVERED]].tolist() == [
        funnel.prompt_tokens, funnel.held_in_fleet, funnel.held_by_chosen, funnel.predicted, funnel.delivered,
    ]  # fmt: skip
    assert sums[facts.MEAN] <= sums[facts.BEST] <= sums[facts.OFFERED] <= sums[facts.PROMPT]
    assert sums[facts.TAKEN] <= sums[facts.BEST]


def test_a_view_that_is_not_live_has_a_mark_as_long_as_that(tmp_path: Path) -> None:
    stream = Stream("w")
    with EventLogWriter(tmp_path) as writer:
        for number in range(20):
            record = stream.batch(stored((0, [number + 1])), now=1_700_000_000.0 + number)
            if number != 7:
                writer.append(record)
        writer.append(stream.resync(now=1_700_000_020.0))
    report, series = audited(tmp_path)
    kinds = {mark.kind: (mark.end_ms - mark.begin_ms) / 1000 for mark in series.marks}
    assert kinds == {"gap": 0.0, "wrong digest": 0.0, "stale": 12.0, "resync": 0.0}
    assert report.streams[0].not_live_s == kinds["stale"]


@pytest.mark.parametrize("seed", range(5))
def test_bins_of_any_times_keep_their_sums_in_their_order(seed: int) -> None:
    dice = random.Random(seed)
    bins = TimeBins()
    sums, levels = Sums(bins, 1), Levels(bins, 1)
    times = [1_700_000_000_000 + int(dice.gauss(0, 1) * 10 ** dice.uniform(2, 9)) for _ in range(500)]
    for number, ms in enumerate(times):
        place = bins.place(ms)
        sums.values[place] += number
        levels.set(place, [number])
    shown = sums.values[bins.shown, 0]
    assert shown.sum() == sums.values.sum() == sum(range(500))
    assert len(shown) <= MOST_BINS
    assert bins.width_ms * MOST_BINS / 4 <= max(times) - min(times) + bins.width_ms * 2 or bins.width_ms == 125
    assert bins.seconds.sum() * 1000 == pytest.approx(max(times) - bins.middles_ms[0] + bins.width_ms / 2, abs=2)
    ends = bins.middles_ms + bins.width_ms / 2
    expected = np.zeros(len(shown), np.int64)
    for number, ms in enumerate(times):
        expected[np.searchsorted(ends, ms, side="right")] += number
    assert shown.tolist() == expected.tolist()


def test_the_curves_of_a_log_that_begins_late_begin_with_what_was_held(tmp_path: Path) -> None:
    busy, idle = Stream("busy"), Stream("idle")
    records = [idle.batch(stored((0, range(1, 8))), now=1_700_000_000.0)]
    records += [busy.batch(stored((0, [100 + number])), now=1_700_000_001.0 + number) for number in range(20)]
    write_late_log(tmp_path, records, 11)
    report, series = audited(tmp_path)
    held = {worker: levels.values[series.bins.shown, 0].tolist() for worker, levels in series.workers.items()}
    assert (held["idle"][0], held["idle"][-1]) == (7, 7)
    assert (held["busy"][0], held["busy"][-1]) == (11, 20)
    tiers = series.tiers.values[series.bins.shown, 0].tolist()
    assert (tiers[0], tiers[-1]) == (18, 27)
    assert sum(each.pages_held for each in report.streams) == 27
    assert series.marks == []


def test_a_level_stays_until_the_next_one() -> None:
    bins = TimeBins()
    levels = Levels(bins, 2)
    for second, value in ((0, 5), (10, 7), (11, 0), (200, 9)):
        levels.set(bins.place(second * 1000), [value, 2 * value])
    at = [(second * 1000 - (bins.origin_ms or 0)) // bins.width_ms for second in (0, 9, 10, 11, 150, 200)]
    assert levels.values[at, 0].tolist() == [5, 5, 7, 0, 0, 9]
    assert levels.values[at, 1].tolist() == [10, 10, 14, 0, 0, 18]
