"""Numbers, times and names as a report shows them."""

from math import isnan

from rich.filesize import decimal

from kv_events.log.moments import utc_text
from kv_events.runtime.words import printable

_LONGEST_NAME = 32
_S_PER_MINUTE, _S_PER_HOUR = 60, 3600


def short_name(text: str) -> str:
    """A name that fits beside a plot: its beginning and its end."""
    shown = printable(text)
    if len(shown) <= _LONGEST_NAME:
        return shown
    half = (_LONGEST_NAME - 1) // 2
    return f"{shown[:half]}…{shown[-half:]}"


def number(value: float, decimals: int = 0) -> str:
    """`1,234,567`; a dash for NaN."""
    return "-" if isnan(value) else f"{value:,.{decimals}f}"


def share(part: float, whole: float) -> str:
    """`12.3%`; a dash if there is no whole."""
    return f"{part / whole:.1%}" if whole else "-"


def size(num_bytes: int) -> str:
    """`1.2 MB`."""
    return decimal(num_bytes, separator="\N{NO-BREAK SPACE}")


def utc(seconds: float, digits: int = 3) -> str:
    """A time in UTC, to be read. digits: of the fraction of the second, 3 or 0."""
    text = utc_text(seconds)
    if text.startswith("@"):
        return text
    return text.removesuffix("Z").replace("T", " ")[: None if digits else -4] + " UTC"


def duration(seconds: float) -> str:
    """A duration in its most readable unit."""
    if seconds < 2 * _S_PER_MINUTE:
        return f"{seconds:,.3g}\N{NO-BREAK SPACE}s"
    if seconds < 2 * _S_PER_HOUR:
        return f"{seconds / _S_PER_MINUTE:,.0f}\N{NO-BREAK SPACE}min"
    return f"{seconds / _S_PER_HOUR:,.1f}\N{NO-BREAK SPACE}h"
