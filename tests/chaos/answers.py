"""What the asker wrote down, without the times in which a service could not answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.chaos.asker import ANSWER_ROW, LEFT_OUT
from tests.chaos.rig import Service

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
        """Number of 5xx, and of connections that failed."""
        return int((self.rows["status"] >= _SERVER_ERROR).sum() + (self.rows["status"] == 0).sum())

    @property
    def num_refused(self) -> int:
        """Number of questions that a service did not answer because it was away."""
        return int((self.away["status"] >= _SERVER_ERROR).sum() + (self.away["status"] == 0).sum())

    @property
    def worst_s(self) -> float:
        """Longest time to an answer."""
        return float(self.rows["seconds"].max(initial=0.0))

    def percentile_s(self, percent: float) -> float:
        """Return a percentile of the times to an answer; 0 without any."""
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
    """Return the answers of several intervals."""
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
