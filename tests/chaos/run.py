"""A chaos run: faults drawn from a seed, singly and overlapping, and what they cost."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tests.chaos.asker import ANSWER_ROW, LEFT_OUT
from tests.chaos.engine import PINNED_TOKENS
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.rig import Rig, Service
from tests.chaos.watch import FRESH_S, Watch, compare

_OVERLAP = 0.3
"""Share of the injections with two faults at once."""
_QUIET_S = 2.0
"""Time without a fault after each one."""
_STABLE_S = FRESH_S + 1.0
"""Time for which all views must stay right. A view that shows another cache is found to be wrong after FRESH_S."""
_PATIENCE = 12
"""A run waits so many times the bound of a fault, to see whether the views become right at all."""
_TAIL_LINES = 15
_SPARES_ENGINES = frozenset({"group", "redis"})
"""Parts whose faults leave every engine known to every service all the time."""
_BEFORE_S, _AFTER_S = 0.1, 0.3  # an answer may end this much before or after its process is known to be away or back
_SERVER_ERROR = 500


class Answers(NamedTuple):
    """The answers of an interval."""

    rows: npt.NDArray[Any]
    """Of services that could answer."""
    away: npt.NDArray[Any]
    """Of services whose process was dead, stopped or starting."""

    @property
    def num_errors(self) -> int:
        return int((self.rows["status"] >= _SERVER_ERROR).sum() + (self.rows["status"] == 0).sum())

    @property
    def num_refused(self) -> int:
        """Number of questions that a service did not answer because it was away."""
        return int((self.away["status"] >= _SERVER_ERROR).sum() + (self.away["status"] == 0).sum())

    @property
    def worst_s(self) -> float:
        return float(self.rows["seconds"].max(initial=0.0))

    def percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.rows["seconds"], percent)) if len(self.rows) else 0.0


def read_answers(file: Path, services: Sequence[Service], since: float, until: float) -> Answers:
    """Return the answers to questions that were asked in an interval of the monotonic clock."""
    written = file.read_bytes()
    rows = np.frombuffer(written[: len(written) // ANSWER_ROW.itemsize * ANSWER_ROW.itemsize], ANSWER_ROW)
    rows = rows[(rows["at"] >= since) & (rows["at"] < until)]
    is_away = np.zeros(len(rows), bool)
    for number, service in enumerate(services):
        for began, ended in service.away:
            overlaps = (rows["at"] < ended + _AFTER_S) & (rows["at"] + rows["seconds"] > began - _BEFORE_S)
            is_away |= (rows["service"] == number) & overlaps
    return Answers(rows[~is_away], rows[is_away])


def joined(parts: Sequence[Answers]) -> Answers:
    empty = np.zeros(0, ANSWER_ROW)
    return Answers(
        np.concatenate([empty, *(part.rows for part in parts)]), np.concatenate([empty, *(part.away for part in parts)])
    )


def live_dips(answers: Answers, least_tokens: int) -> int:
    """Return the number of answers in which a live view claims fewer tokens of a held prompt than its engine holds."""
    held = answers.rows["held"]
    return int(((held >= 0) & (held < least_tokens)).sum())


def left_out(answers: Answers) -> int:
    """Return the number of answers that lack an engine and do not say that something is missing."""
    return int((answers.rows["held"] == LEFT_OUT).sum())


class Outcome(msgspec.Struct, kw_only=True):
    """What happened at one injection."""

    number: int
    faults: list[str]
    within_s: float
    converged_s: float | None
    """Seconds from the end of the fault until all views were right. None: they did not become so."""
    resent_pages: int
    """Pages that the publishers sent again in resyncs."""
    queries: int
    worst_s: float
    """Longest time to an answer of a service that could answer."""
    p99_s: float
    errors: int
    """5xx and failed connections of services that could answer."""
    refused: int
    """Questions to a service that was dead, stopped or starting."""
    divergent_pages: int
    lies: int
    """Views that were `live` and had been wrong for longer than two heartbeats, answers from a live view with fewer
    tokens than the engine holds, and answers of a group that leave an engine out without a word."""
    longest_wrong_s: float
    """Longest time for which a live view had been wrong."""
    load: float
    """Load of the machine, over a minute."""
    details: list[str]
    """What is needed to find the cause of a failure."""

    @property
    def is_right(self) -> bool:
        return self.is_healed and not self.lies and (self.converged_s or 0.0) <= self.within_s

    @property
    def is_healed(self) -> bool:
        """Whether all views became right, however long it took, and no query failed."""
        return self.converged_s is not None and not (self.divergent_pages or self.errors)


class Report(msgspec.Struct, kw_only=True):
    seed: int
    minutes: float
    quiet_p99_s: float
    faulty_p99_s: float
    queries: int
    outcomes: list[Outcome]

    @property
    def is_healed(self) -> bool:
        return all(each.is_healed for each in self.outcomes)

    @property
    def is_right(self) -> bool:
        return all(each.is_right for each in self.outcomes)


def run(
    folder: Path,
    seed: int,
    minutes: float,
    names: Sequence[str],
    show: Callable[[Outcome], None],
    most: int | None = None,
) -> Report:
    """Run faults until the time is over. names: those to draw from. most: at most so many injections.

    show: called after each injection.
    """
    with Rig(folder, num_services=1 + seed % 3) as rig, Watch(rig) as watch:
        return _Run(rig, watch, seed, [FAULTS[name] for name in names]).go(minutes, show, most)


class _Run:
    def __init__(self, rig: Rig, watch: Watch, seed: int, faults: Sequence[Fault]) -> None:
        self._rig, self._watch, self._seed = rig, watch, seed
        self._deck = _deck(Random(seed), faults)
        self._quiet: list[Answers] = []
        self._faulty: list[Answers] = []

    def go(self, minutes: float, show: Callable[[Outcome], None], most: int | None) -> Report:
        outcomes = list[Outcome]()
        began = time.monotonic()
        assert self._converged_at(began, 300) is not None, self._watch.newest()
        self._be_quiet(5 * _QUIET_S)
        end = time.monotonic() + 60 * minutes
        while not outcomes or (time.monotonic() < end and (most is None or len(outcomes) < most)):
            faults = next(self._deck)
            try:
                outcome = self._injection(len(outcomes), faults)
            except Exception as error:
                names = ", ".join(each.name for each in faults)
                error.add_note("\n".join([f"seed {self._seed}, injection {len(outcomes)}: {names}", *self._tails()]))
                raise
            outcomes.append(outcome)
            show(outcome)
            self._be_quiet(_QUIET_S)
        return Report(
            seed=self._seed,
            minutes=(time.monotonic() - began) / 60,
            quiet_p99_s=joined(self._quiet).percentile_s(99),
            faulty_p99_s=joined(self._faulty).percentile_s(99),
            queries=sum(len(each.rows) for each in (*self._quiet, *self._faulty)),
            outcomes=outcomes,
        )

    def _injection(self, number: int, faults: Sequence[Fault]) -> Outcome:
        within_s = max(each.within_s for each in faults)
        resent = self._resent()
        began = time.monotonic()
        self._inject(faults, Random(f"{self._seed}/{number}"))
        healed = time.monotonic()
        right_at = self._converged_at(healed, _PATIENCE * within_s)
        faulty_until = time.monotonic()
        differences = compare(self._rig, _PATIENCE * within_s)
        answers = read_answers(self._rig.answers, self._rig.all_services, began, faulty_until)
        self._faulty.append(answers)
        wrong, lies = self._watch.wrong_since(began), self._watch.lies_since(began)
        outcome = Outcome(
            number=number,
            faults=[each.name for each in faults],
            within_s=within_s,
            converged_s=None if right_at is None else max(0.0, right_at - healed),
            resent_pages=_sent_again(resent, self._resent()),
            queries=len(answers.rows),
            worst_s=answers.worst_s,
            p99_s=answers.percentile_s(99),
            errors=answers.num_errors,
            refused=answers.num_refused,
            divergent_pages=sum(each.pages for each in differences),
            lies=len({(each.service, each.engine) for each in lies})
            + live_dips(answers, PINNED_TOKENS)
            + (left_out(answers) if all(each.touches <= _SPARES_ENGINES for each in faults) else 0),
            longest_wrong_s=max((each.wrong_s for each in wrong), default=0.0),
            load=os.getloadavg()[0],
            details=[],
        )
        if not outcome.is_right or differences:
            bad = answers.rows[(answers.rows["status"] >= 500) | (answers.rows["status"] == 0)]
            outcome.details = [
                *map(str, self._watch.newest()),
                *map(str, differences),
                *(f"lie: {each}" for each in lies[:10]),
                *(f"failed: {row} ({row['at'] - began:.2f} s after the fault began)" for row in bad[:10]),
                *self._tails(),
            ]
        return outcome

    def _inject(self, faults: Sequence[Fault], random: Random) -> None:
        courses = [each.course(self._rig, random) for each in faults]
        hold_s = max(each.hold_s for each in faults)
        for course in courses:
            next(course)
            time.sleep(random.uniform(0, 0.5) if len(courses) > 1 else 0)
        time.sleep(hold_s)
        random.shuffle(courses)
        for course in courses:
            for _ in course:
                raise AssertionError("a fault yields once")

    def _converged_at(self, since: float, patience_s: float) -> float | None:
        """Return when all views became right and stayed so."""
        give_up = time.monotonic() + patience_s
        while time.monotonic() < give_up:
            right = self._watch.right_since
            if right is not None and time.monotonic() - max(right, since) >= _STABLE_S:
                return right
            time.sleep(0.05)
        return None

    def _be_quiet(self, seconds: float) -> None:
        since = time.monotonic()
        time.sleep(seconds)
        self._quiet.append(read_answers(self._rig.answers, self._rig.all_services, since, time.monotonic()))

    def _resent(self) -> dict[tuple[str, int], int]:
        stats = {engine.name: engine.stats() for engine in self._rig.all_engines}
        return {(name, each.epoch): each.resync_pages for name, each in stats.items()}

    def _tails(self) -> Iterator[str]:
        for log in (*(each.log for each in self._rig.all_services), *(each.log for each in self._rig.all_engines)):
            yield f"--- {log}"
            if log.exists():
                yield from log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]


def _sent_again(before: dict[tuple[str, int], int], after: dict[tuple[str, int], int]) -> int:
    return sum(pages - before.get(incarnation, 0) for incarnation, pages in after.items())


def _deck(random: Random, faults: Sequence[Fault]) -> Iterator[list[Fault]]:
    """Yield faults to inject: all of them in random order, again and again, some of them two at a time."""
    for _ in count():
        left = random.sample(list(faults), len(faults))
        while left:
            drawn = [left.pop()]
            others = [each for each in left if not each.touches & drawn[0].touches]
            if others and random.random() < _OVERLAP:
                drawn.append(random.choice(others))
                left.remove(drawn[1])
            yield drawn
