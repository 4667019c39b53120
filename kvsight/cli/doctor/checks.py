"""Checks, and what they find."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, Self

import msgspec

from kv_events.errors import KvsightError
from kv_events.runtime.words import printable
from kvsight.cli.shared.console import UsageError

_STATE_WIDTH, _NAME_WIDTH = 9, 12


class BrokenError(KvsightError):
    """A link of the chain is broken. remedy: what to do about it."""

    def __init__(self, detail: str, remedy: str, *others: Self) -> None:
        """others: further ones that the same check has found."""
        super().__init__(detail)
        self.remedy = remedy
        self.others = others


class SkippedError(KvsightError):
    """A check cannot be done here. The text says why. The chain may still be whole."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    check: str
    state: Literal["ok", "FAILED", "skipped"]
    detail: str
    remedy: str = ""
    """What to do. Empty unless the check failed."""

    def lines(self) -> Iterator[str]:
        """The finding for people."""
        yield f"{self.state:<{_STATE_WIDTH}}{self.check:<{_NAME_WIDTH}}{printable(self.detail)}"
        if self.remedy:
            yield f"{'':<{_STATE_WIDTH}}what to do: {printable(self.remedy)}"


class Check(NamedTuple):
    """One link of the chain."""

    name: str
    run: Callable[[], str]
    """Returns what it found. Raises SkippedError, BrokenError, or another KvsightError of the part that it uses."""
    remedy: str
    """What to do about an error that is not a BrokenError."""


def examine(checks: Iterable[Check]) -> Iterator[CheckResult]:
    """Run checks in order, and yield the findings of each one up to the first that fails. Raises UsageError."""
    for check in checks:
        findings = _findings(check)
        yield from findings
        if findings[-1].state == "FAILED":
            return


def _findings(check: Check) -> list[CheckResult]:
    try:
        return [CheckResult(check=check.name, state="ok", detail=check.run())]
    except UsageError:
        raise
    except SkippedError as reason:
        return [CheckResult(check=check.name, state="skipped", detail=str(reason))]
    except BrokenError as error:
        found = (error, *error.others)
        return [CheckResult(check=check.name, state="FAILED", detail=str(e), remedy=e.remedy) for e in found]
    except KvsightError as error:
        return [CheckResult(check=check.name, state="FAILED", detail=str(error), remedy=check.remedy)]
