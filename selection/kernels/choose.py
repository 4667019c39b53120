"""Kernels of policies."""

from kv_events.kernels.bundles import F64Vector, I32Vector, I64Vector
from kv_events.kernels.declare import kernel
from kv_events.kernels.numbers import int32, int64, uint64

_GOLDEN, _HALF = uint64(0x9E3779B97F4A7C15), uint64(32)
"""The golden ratio's fraction of 2**64. Its multiples are spread evenly, and so are every second, third, ... of them:
callers that ask in a regular order get all candidates, too. Source: Knuth, The Art of Computer Programming, 6.4.
"""


@kernel
def lowest_cost(costs: F64Vector, computed: F64Vector, turn: int) -> int:
    """Return the row with the lowest cost. Of several, those that compute least take turns.

    costs, computed: float64[n], n > 0. turn: a number that counts the calls.
    """
    least, fewest, num_best = costs[0], computed[0], int64(0)
    for row in range(costs.shape[0]):
        if costs[row] < least or (costs[row] == least and computed[row] < fewest):
            least, fewest, num_best = costs[row], computed[row], int64(0)
        num_best += costs[row] == least and computed[row] == fewest
    skipped = int64(((uint64(turn) * _GOLDEN) >> _HALF) * uint64(num_best) >> _HALF)
    for row in range(costs.shape[0]):
        if costs[row] == least and computed[row] == fewest:
            if skipped == 0:
                return int64(row)
            skipped -= 1
    return int64(0)


@kernel
def least_work(
    prefill_tokens: I64Vector, computed: F64Vector, decode_blocks: I64Vector, scale: float, turn: int, costs: F64Vector
) -> int:
    """Write the costs of `policies.OverlapLoadPolicy`, and return the row with the lowest one, see `lowest_cost`.

    scale: of prefill tokens. costs: float64[n], as the other columns.
    """
    for row in range(costs.shape[0]):
        costs[row] = (prefill_tokens[row] + computed[row]) * scale + decode_blocks[row]
    return lowest_cost(costs, computed, turn)


@kernel
def shown_rows(costs: F64Vector, chosen: int, rows: I32Vector) -> int:
    """Write the rows that a record shows: all of them or, if they are too many, the cheapest ones and the chosen one.

    costs: float64[n]. rows: int32[m], of which min(n, m) are written. Returns the index of the chosen one.
    """
    room = min(costs.shape[0], rows.shape[0])
    for row in range(costs.shape[0]):
        at = int64(min(row, room))
        while room < costs.shape[0] and at > 0 and costs[rows[at - 1]] > costs[row]:
            at -= 1
            if at + 1 < room:
                rows[at + 1] = rows[at]
        if at < room:
            rows[at] = int32(row)
    for i in range(room):
        if rows[i] == chosen:
            return int64(i)
    rows[room - 1] = int32(chosen)
    return int64(room - 1)
