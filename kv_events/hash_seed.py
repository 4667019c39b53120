"""The seed of the sequence hashes. A deployment uses one seed, because two seeds give every page two hashes."""

import os
from functools import cache

from kv_events.errors import InvalidValueError

SEED_VARIABLE = "KVSIGHT_HASH_SEED"
SEED = 1337
"""The seed of Dynamo, the SMG gateway and TokenSpeed, and the default."""
SEEDS = {"dynamo": SEED}
"""Named seeds."""

_HIGHEST = 2**64 - 1


def parse_seed(text: str, field: str = SEED_VARIABLE) -> int:
    """Parse a name of `SEEDS` or a decimal 64-bit number. Raises InvalidValueError naming the field."""
    if text in SEEDS:
        return SEEDS[text]
    if text.isascii() and text.isdecimal() and len(text) <= len(str(_HIGHEST)) and int(text) <= _HIGHEST:
        return int(text)
    raise InvalidValueError(field, text, f"{' or '.join(SEEDS)}, or a number in 0 .. {_HIGHEST}")


@cache
def process_seed() -> int:
    """Return the seed of this process, `KVSIGHT_HASH_SEED`, used by caches, publishers, bridge and API.

    The variable is read once, so that all parts of a process agree. Raises InvalidValueError.
    """
    return parse_seed(os.environ.get(SEED_VARIABLE, "dynamo"))
