"""Kernels that write the record of a reservation, as `kv_events.reservations` reads it."""

from typing import NamedTuple

from api.fast.kernels.answer import EXTERNAL
from api.fast.kernels.text import MARGIN, Texts, put_number, put_piece, put_text
from kv_events.kernels.bundles import F64Vector, I32Vector, U8Vector, U64Input
from kv_events.kernels.declare import helper
from kv_events.kernels.instructions import put_eight
from kv_events.kernels.msgpack import put_array, put_bin, put_float, put_integer, put_short_text
from kv_events.kernels.numbers import int64, uint8
from selection.kernels.weigh import RosterColumns

OPENING, NAMES, SCOPE = range(3)


class Name(NamedTuple):
    """The name of a reservation."""

    number: int
    """It ends with this number, unless the request has a name."""
    data: U8Vector
    start: int
    end: int
    """The name that the request has: `data[start:end]`, empty if it has none."""


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


@helper
def put_name(out: U8Vector, at: int, pieces: Texts, name: Name) -> int:
    """Write a name as plain text. Returns its end. pieces: those of `RecordTexts`."""
    if name.start == name.end:
        return put_number(out, put_piece(out, at, pieces, NAMES), name.number)
    for i in range(name.start, name.end):
        out[at] = name.data[i]
        at += 1
    return at


@helper
def put_record(
    out: U8Vector,
    at: int,
    texts: RecordTexts,
    name: Name,
    now: float,
    prompt: tuple[int, int],
    hashes: U64Input,
    choice: tuple[int, int],
    roster: RosterColumns,
    costs: F64Vector,
    session: U8Vector,
) -> int:
    """Write a record. Returns its end. `out` has `MARGIN` bytes more.

    now: seconds since 1970. prompt: tokens, and those of them that are to be computed. choice: number
    of candidates in `texts.shown`, and which of them was chosen. session: `MARGIN` bytes follow it.
    """
    (tokens, prefill), (count, index), shown = prompt, choice, texts.shown
    start = put_short_text(out, put_piece(out, at, texts.pieces, OPENING), int64(0))
    at = put_name(out, start, texts.pieces, name)
    out[start - 1] = uint8(at - start)  # the length
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
