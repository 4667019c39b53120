"""Kernels of policies."""

from kv_events.kernels.bundles import F64Vector, I64Vector
from kv_events.kernels.declare import kernel
from kv_events.kernels.numbers import int64


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
    skipped = turn % max(num_best, int64(1))
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
