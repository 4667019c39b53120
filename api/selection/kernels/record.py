"""Kernels that write the records of reservations, as `kv_events.reservations` reads them."""

from typing import NamedTuple

import numpy as np

from api.fast.kernels.answer import EXTERNAL
from api.fast.kernels.text import MARGIN, Texts, put_piece, put_text
from kv_events.kernels.bundles import F64Vector, I32Vector, I64Matrix, I64Vector, U8Vector, U64Input
from kv_events.kernels.declare import helper
from kv_events.kernels.instructions import put_eight
from kv_events.kernels.msgpack import put_array, put_bin, put_float, put_integer, put_short_text
from kv_events.kernels.numbers import int64
from selection.kernels.weigh import RosterColumns

OPENING, NAMES, SCOPE = range(3)
NUM_RECORDS, NUM_HASHES, NUM_BYTES, NUM_LOST, TOKENS, MOST_HELD, HELD = range(7)
"""Elements of `BookedChoices.made`: number of choices, of the pages of their prompts, of bytes of their records, and of
rows of `lost`; sums of the tokens of the prompts, of those that the best candidates held, and the chosen ones, on any
tier.
"""
ROW, REQUESTS, LOST_TOKENS, NUMBER = range(4)
"""Columns of `BookedChoices.lost`: row of the roster; requests for which another candidate held more, and by how many
tokens; the number of the last such choice."""
NAME_HEAD_BYTES = 2
"""What `put_name` writes before a name: the last byte is its size."""


class BookedChoices(NamedTuple):
    """Choices that a kernel has booked: room for m of them. m is 0 if choices are not booked."""

    made: I64Vector
    """[7] see NUM_RECORDS."""
    ends: I64Vector
    """[m] end of each record."""
    lost: I64Matrix
    """[m, 4] what was lost, by the chosen rank: see ROW."""
    records: U8Vector
    """Their records, one after the other."""
    name: U8Vector
    """The name of the request that is answered, and `MARGIN` bytes."""


class RecordTexts(NamedTuple):
    """What the records of a roster have in common, as msgpack."""

    pieces: Texts
    """[3] what comes before the name; the beginning of names that end with a number, as plain text; model, tenant and
    block size.
    """
    ranks: Texts
    """[n] worker and rank."""
    shown: I32Vector
    """[up to n] scratch: the candidates of a record, see `shown_rows`."""


def make_choices(num_choices: int, num_bytes: int, name_bytes: int) -> BookedChoices:
    """Return room for choices, for the bytes of their records, and for a name."""
    return BookedChoices(
        np.zeros(HELD + 1, np.int64),
        np.zeros(num_choices, np.int64),
        np.zeros((num_choices, NUMBER + 1), np.int64),
        np.zeros(num_bytes, np.uint8),
        np.zeros(name_bytes + MARGIN, np.uint8),
    )


@helper
def put_name(out: U8Vector, at: int, name: U8Vector, name_bytes: int) -> int:
    """Write a name as msgpack. Returns its end."""
    return put_text(out, put_short_text(out, at, name_bytes), name, int64(0), name_bytes)


@helper
def put_record(
    out: U8Vector,
    at: int,
    texts: RecordTexts,
    name: tuple[U8Vector, int],
    now: float,
    prompt: tuple[int, int],
    hashes: U64Input,
    choice: tuple[int, int],
    roster: RosterColumns,
    costs: F64Vector,
    session: U8Vector,
) -> int:
    """Write the record of a choice. Returns its end. `out` has `MARGIN` bytes more.

    name: text and size. now: seconds since 1970. prompt: tokens, and those of them that are to be computed. choice:
    number of candidates in `texts.shown`, and which of them was chosen. session: `MARGIN` bytes follow it.
    """
    (tokens, prefill), (count, index), shown = prompt, choice, texts.shown
    at = put_name(out, put_piece(out, at, texts.pieces, OPENING), name[0], name[1])
    at = put_piece(out, put_float(out, at, now), texts.pieces, SCOPE)
    at = put_bin(out, put_integer(out, at, tokens), 8 * hashes.shape[0])
    for i in range(hashes.shape[0]):
        put_eight(out, at, hashes[i])
        at += 8
    at = put_piece(out, at, texts.ranks, roster.rows[shown[index]])
    at = put_array(out, put_integer(out, at, roster.held[shown[index], EXTERNAL]), count)
    for i in range(count):
        row = shown[i]
        at = put_piece(out, put_array(out, at, 4), texts.ranks, roster.rows[row])
        at = put_float(out, put_integer(out, at, roster.held[row, EXTERNAL]), -costs[row])
    return put_text(out, put_integer(out, at, prefill), session, int64(0), session.shape[0] - MARGIN)
