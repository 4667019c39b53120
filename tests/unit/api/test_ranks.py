"""The data about each DP rank in an answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.log.records import Stream

TOKENS = list(range(1, 17))


@pytest.mark.parametrize(
    ("query", "path"),
    [({"model_name": "m"}, "instances"), ({"model": "m", "block_size": 4}, "default")],
    ids=["peer", "rfc"],
)
async def test_ranks_are_distinguished_on_every_tier(serving: Any, query: dict[str, Any], path: str) -> None:
    async with serving() as (client, fed):
        await fed.hold(Stream("w"), TOKENS, {0: range(3)})
        await fed.hold(Stream("w", dp_rank=1), TOKENS, {0: range(1), 1: range(1, 4)})
        await fed.hold(Stream("alike"), TOKENS)
        plain = (await client.post("/query", json={**query, "token_ids": TOKENS})).json()[path]
        weighed = (
            await client.post("/query", json={**query, "token_ids": TOKENS, "tier_weights": [1, 0.5, 0, 0]})
        ).json()[path]
    assert (plain["w"]["longest_matched"], plain["w"]["matched_dp"]) == (16, {"0": 12, "1": 16})
    assert "weighted_dp" not in plain["w"]
    assert weighed["w"]["weighted"] == 12 + 0.5 * 4  # more than any single rank has
    assert weighed["w"]["weighted_dp"] == {"0": 12.0, "1": 4 + 0.5 * 12}
    assert weighed["alike"]["weighted"] == 16.0
    assert not {"matched_dp", "weighted_dp"} & weighed["alike"].keys()  # omitted: they would repeat other fields
