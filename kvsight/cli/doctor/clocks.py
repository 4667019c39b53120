"""Compares the clocks of a deployment with this machine's."""

from __future__ import annotations

from collections.abc import Mapping

from kvsight.cli.doctor.checks import BrokenError, SkippedError
from kvsight.cli.shared.engine_client import ClockReading

_MAX_SKEW_S = 2.0
_DATE_ERROR_S = 0.5
"""Half of the resolution of an HTTP date."""


def judge_clocks(clocks: Mapping[str, float | None]) -> str:
    """Return what to print if the clocks agree. clocks: name -> seconds ahead; None: it cannot be read.

    Raises BrokenError if one is wrong, which may be this machine's, and SkippedError if none can be read.
    """
    ahead = {name: seconds for name, seconds in clocks.items() if seconds is not None}
    if not ahead:
        raise SkippedError("no other clock can be read")
    wrong = {name: seconds for name, seconds in ahead.items() if abs(seconds) > _MAX_SKEW_S}
    remedy = "synchronise the clocks of all machines, for example with chrony: ages and recordings depend on them"
    if len(wrong) > 1 and len(wrong) == len(ahead) and len({seconds > 0 for seconds in wrong.values()}) == 1:
        seconds = -min(wrong.values(), key=abs)
        raise BrokenError(f"this machine's clock is {_offset(seconds)}, compared with {', '.join(wrong)}", remedy)
    for name, seconds in wrong.items():
        raise BrokenError(f"the clock of {name} is {_offset(seconds)}", remedy)
    return f"{', '.join(ahead)} and this machine differ by less than {_MAX_SKEW_S:g} s"


def seconds_ahead(clock: ClockReading | None) -> float | None:
    """The least by which the clock of an HTTP server is certainly ahead, or behind: its date has whole seconds."""
    if clock is None:
        return None
    ahead_s = clock.theirs + _DATE_ERROR_S - clock.ours
    return max(0.0, ahead_s - _DATE_ERROR_S) + min(0.0, ahead_s + _DATE_ERROR_S)


def _offset(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead' if seconds > 0 else 'behind'}"
