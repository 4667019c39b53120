"""The seed of the sequence hashes: one for a whole deployment, because two seeds give two names to every page."""

from __future__ import annotations

import os
from functools import cache

from kv_events.errors import InvalidValueError

SEED_VARIABLE = "KVSIGHT_HASH_SEED"
SEED = 1337
"""The seed of Dynamo, the SMG gateway and TokenSpeed; what holds where nothing else is said."""
SEEDS = {"dynamo": SEED}
"""Seeds that have a name."""

_HIGHEST = 2**64 - 1


def parse_seed(text: str, field: str = SEED_VARIABLE) -> int:
    """A name in `SEEDS`, or a decimal number of 64 bits. Raises InvalidValueError naming the field."""
    if text in SEEDS:
        return SEEDS[text]
    if text.isascii() and text.isdecimal() and len(text) <= len(str(_HIGHEST)) and int(text) <= _HIGHEST:
        return int(text)
    raise InvalidValueError(field, text, f"{' or '.join(SEEDS)}, or a number in 0 .. {_HIGHEST}")


@cache
def process_seed() -> int:
    """The seed of this process, `KVSIGHT_HASH_SEED`: of its caches, publishers, bridge and API alike. Read once, so
    that no two parts of a process can differ. Raises InvalidValueError."""
    return parse_seed(os.environ.get(SEED_VARIABLE, "dynamo"))
