"""Rows: the form in which kernels return events, one row of columns for each."""

from typing import NamedTuple

from kv_events.kernels.bundles import I64Matrix, I64Vector, U8Vector, U32Vector, U64Vector
from kv_events.kernels.declare import inline_helper
from kv_events.schema import MEDIUM_INDEX, NUM_MEDIA, StorageMedium

# columns of a row
KIND, REASON, START, STOP, SHAPE, CONTINUES = range(6)
HASH_FROM, HASH_TO, TOKEN_FROM, TOKEN_TO, PAIRS, HAS_PARENT, PARENT, BLOCK_SIZE, GROUP, LORA_ID, WINDOW = range(6, 17)
# texts and encoded extra keys: (position, length) in the payload; length 0: absent or empty
MEDIUM, MEDIUM_LENGTH, LORA, LORA_LENGTH, SALT, SALT_LENGTH, SPEC, SPEC_LENGTH = range(17, 25)
LOCALITY, LOCALITY_LENGTH, EXTRA, EXTRA_LENGTH = range(25, 29)
# tier; only in the first row of a run: row of its first store (-1: none), whether its events are of several kinds
TIER, STORE_ROW, IS_MIXED = range(29, 32)
NUM_COLUMNS = 32

REMOVAL = NUM_MEDIA
"""Added to the tier of an event that removes pages, as in the publisher's events."""

UNKNOWN = 128
"""Tier of an event whose medium no kernel knows. Python looks at the medium, and the ledger skips the event."""
_GPU, _CPU, _DISK, EXTERNAL = (MEDIUM_INDEX[medium.value] for medium in StorageMedium)
TIERS = {
    "": _GPU,  # absent
    "GPU": _GPU,
    "CPU": _CPU,  # vLLM's offload, LMCache, Mooncake
    "CPU_PINNED": _CPU,  # SGLang
    "CPU_TIER1": _CPU,  # Dynamo's block manager; also the next two
    "CPU_TIER2": _DISK,
    "NVME": _DISK,
    "DISK": _DISK,
    "FS": _DISK,  # vLLM's offload; also the next two
    "OBJ": _DISK,
    "STORAGE": _DISK,
    "EXTERNAL": EXTERNAL,  # SGLang's third level
    "REMOTE": EXTERNAL,  # ATOM
}
"""Tiers by the engines' names of media, in capital letters."""

# kinds of event; BAD_STORE: an invalid store, which at least removes nothing
STORED, REMOVED, CLEARED, MOONCAKE_EVENT, UNREADABLE, BAD_STORE = range(6)

REASONS = ("", "type", "range", "tokens", "tag", "truncated")
"""Texts of the values of column REASON."""
OK, TYPE, RANGE, TOKENS, TAG, TRUNCATED = range(len(REASONS))


class ScannedEvents(NamedTuple):
    """Output of `scan_batches`: up to n events, with their hashes and tokens. Columns are as in `PageEvents`."""

    rows: I64Matrix
    """[n, NUM_COLUMNS]"""
    lengths: I64Vector
    """[n]"""
    parents: U64Vector
    """[n]"""
    has_parent: U8Vector
    """[n]"""
    kinds: U8Vector
    """[n] tier, and bit REMOVAL for a removal."""
    hashes: U64Vector
    """Filled from the start; columns HASH_FROM and HASH_TO index it. Longer than all payloads."""
    tokens: U32Vector
    """Filled from the start; columns TOKEN_FROM and TOKEN_TO index it. Longer than all payloads."""


@inline_helper
def reject(row: I64Vector, reason: int) -> int:
    row[REASON] = reason
    return -1
