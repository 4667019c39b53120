"""Numbers with a unit, as people write them in flags and variables: `20GiB`, `7d`."""

from __future__ import annotations

import re

from kv_events.errors import InvalidValueError

BYTES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_quantity(field: str, text: str, units: dict[str, int]) -> float:
    """Return a positive number, multiplied by its unit. units: unit -> factor. Raises InvalidValueError."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if found is None or found[2] not in units or not float(found[1]) > 0:
        expected = f"a positive number with one of the units {', '.join(filter(None, units))}"
        raise InvalidValueError(field, text, expected)
    return float(found[1]) * units[found[2]]
