"""The prompt that simulated engines hold in part, and the requests around it."""

from __future__ import annotations

from itertools import islice

import msgspec
import numpy as np
from typer.testing import CliRunner

from kvsight.cli.main import app
from simulation.workload import DEMO_TOKENS, demo_prompt, engine_requests, kept_part


def test_engines_keep_beginnings_of_different_lengths_that_are_whole_pages() -> None:
    parts = [kept_part(seed) for seed in range(4)]
    assert [len(part) for part in parts] == [DEMO_TOKENS, DEMO_TOKENS // 2, DEMO_TOKENS // 4, DEMO_TOKENS // 8]
    for part in parts:
        assert len(part) % 64 == 0
        assert np.array_equal(part, demo_prompt()[: len(part)])


def test_an_engine_serves_its_part_first_and_again_and_again() -> None:
    served = list(islice(engine_requests(1), 200))
    kept = [number for number, each in enumerate(served) if np.array_equal(each.token_ids, kept_part(1))]
    assert kept[0] == 0
    assert max(np.diff(kept)) < 60


def test_engines_of_different_seeds_serve_different_requests() -> None:
    one, other = (next(islice(engine_requests(seed), 1, None)) for seed in (0, 1))
    assert not np.array_equal(one.token_ids, other.token_ids)


def test_the_command_prints_the_query() -> None:
    printed = CliRunner().invoke(app, ["demo-prompt", "--model", "m"]).stdout
    query = msgspec.json.decode(printed)
    assert query == {"model_name": "m", "token_ids": demo_prompt().tolist()}
    assert printed.count("\n") == 1
