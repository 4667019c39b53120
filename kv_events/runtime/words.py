"""Names, numbers, durations and times as people read them in lines of text."""

import re
from collections.abc import Collection, Sequence
from datetime import datetime
from difflib import get_close_matches

_MS_PER_S, _S_PER_MINUTE, _S_PER_HOUR = 1000, 60, 3600
_UNSEEN = re.compile(
    "^ +$|[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Texts of spaces, and characters without a shape that count as printable."""


def printable(text: str) -> str:
    """The text, with control characters and what cannot be seen escaped: names come from other machines and must not
    steer a terminal, or look like another name or like none.
    """
    shown = text if text.isprintable() else repr(text)[1:-1]
    return _UNSEEN.sub(
        lambda found: "".join(f"\\x{ord(c):02x}" if c == " " else ascii(c)[1:-1] for c in found[0]), shown
    )


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key by which `worker-2` precedes `worker-10`."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part) if part[:1].isdigit() else -1, part) for part in parts]


def duration(ms: int) -> str:
    """A duration in its most readable unit."""
    seconds = ms / _MS_PER_S
    if seconds < 2 * _S_PER_MINUTE:
        return f"{seconds:.1f} s"
    if seconds < 2 * _S_PER_HOUR:
        return f"{seconds / _S_PER_MINUTE:.0f} min"
    return f"{seconds / _S_PER_HOUR:.0f} h"


def names(several: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(several) - most:,} more" if len(several) > most else ""
    return separator.join(map(printable, several[:most])) + more


def nearest(name: str, known: Collection[str]) -> str:
    """The known name that is most like one that is not known."""
    return printable(
        next(iter(get_close_matches(name, sorted(known), n=1, cutoff=0.0)), "not known, because there is none")
    )


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 page`, `2,000 pages`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def partial_page(number: int, noun: str, block_size: int) -> str:
    """Why no worker can hold any of a prompt."""
    return f"{count(number, noun)}: less than one page of {block_size}"


def local_time(seconds: float) -> str:
    """A time in the local zone, with the zone's offset. seconds: since 1970.

    Times in a log come from other machines, and may be none that a calendar has.
    """
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"@{seconds:g}"
