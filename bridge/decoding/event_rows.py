"""How kernels note what an event says: a row of columns."""

from __future__ import annotations

from kv_events.kernels import array_helper

# columns of rows: one row an event
KIND, REASON, START, STOP, SHAPE, CONTINUES = range(6)
HASH_FROM, HASH_TO, TOKEN_FROM, TOKEN_TO, PAIRS, HAS_PARENT, PARENT, BLOCK_SIZE, GROUP, LORA_ID = range(6, 16)
# texts, and extra keys as they came: (place, length) in the payload, length 0: absent or empty
MEDIUM, MEDIUM_LENGTH, LORA, LORA_LENGTH, SALT, SALT_LENGTH, SPEC, SPEC_LENGTH = range(16, 24)
LOCALITY, LOCALITY_LENGTH, EXTRA, EXTRA_LENGTH = range(24, 28)
# of the row with which a run begins: the run's first store (-1: none), how many media it names, and rows that name them
STORE_ROW, NUM_PLACES, PLACE_ROWS = range(28, 31)
MOST_PLACES = 4
NUM_COLUMNS = PLACE_ROWS + MOST_PLACES

# kinds of event
STORED, REMOVED, CLEARED, ENVELOPE, UNREADABLE, BAD_STORE = range(6)
# the last one: a store that cannot be read, which at least removes nothing

REASONS = ("", "type", "range", "tokens", "tag", "truncated")
"""Words for the column REASON."""
OK, TYPE, RANGE, TOKENS, TAG, TRUNCATED = range(len(REASONS))


@array_helper
def fail(row, reason):
    row[REASON] = reason
    return -1
