"""Each policy against its rule, written again for one candidate at a time."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.errors import InvalidValueError
from selection.candidates import Asked, Candidates, Choice, selected
from selection.kernels.choose import shown_rows
from selection.policies import POLICIES, WRAPPERS, create_policy, seed_choices

BLOCK = 16


def candidates(**columns: Any) -> Candidates:
    """Candidates with some columns; the others are zeros."""
    size = len(next(iter(columns.values())))
    given_columns = {name: values if name == "roles" else np.array(values) for name, values in columns.items()}
    given_columns["computed"] = np.array(columns.get("computed", [160.0] * size), float)
    zeros = {
        name: np.zeros(size, np.int64) for name in ("predicted", "prefill_tokens", "decode_blocks", "requests", "pages")
    }
    defaults = {"held": np.zeros((size, 4), np.int64), "roles": [""] * size}
    workers = [f"w{number}" for number in range(size)]
    fixed: dict[str, Any] = {"workers": workers, "dp_ranks": [0] * size, "block_size": BLOCK}
    return Candidates(**{**fixed, **zeros, **defaults, **given_columns})


rows = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 500)),
    min_size=1,
    max_size=9,
)


def columns_of(given_rows: list[tuple[int, ...]]) -> Candidates:
    names = ("computed", "prefill_tokens", "decode_blocks", "requests")
    return candidates(**dict(zip(names, zip(*given_rows, strict=True), strict=True)))


@given(
    rows,
    st.sampled_from(["overlap-load", "lmetric", "priority"]),
    st.floats(-9, 9),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_the_choice_has_the_lowest_cost(
    given_rows: list[tuple[int, ...]], name: str, priority: float, scale: float
) -> None:
    costs = []
    for computed, prefill, blocks, requests in given_rows:
        match name:
            case "overlap-load":
                costs.append((computed + prefill) * scale / BLOCK + blocks)
            case "lmetric":
                costs.append(max(1, computed + prefill) * (requests + 1))
            case _:
                costs.append(computed / BLOCK + (prefill / BLOCK + blocks) * 2 ** max(-4, min(4, priority)))
    asked = Asked(160, priority=priority, options={"prefill_load_scale": scale})
    choice = create_policy(name).choose(asked, columns_of(given_rows))
    assert choice.costs.tolist() == pytest.approx(costs)
    assert choice.costs[choice.row] == choice.costs.min()
    assert choice.reason


@pytest.mark.parametrize("number", [2, 3, 4, 64])
@pytest.mark.parametrize("name", POLICIES)
def test_equal_candidates_take_turns_also_for_a_caller_who_has_every_second_or_third_one(
    name: str, number: int
) -> None:
    policy, equal = create_policy(name), candidates(computed=[160.0] * number)
    rows = [policy.choose(Asked(160), equal).row for _ in range(10 * number * 6)]
    for others in range(6):
        counts = Counter(rows[:: others + 1][: 10 * number])
        assert len(counts) == number
        assert 5 <= min(counts.values()) <= max(counts.values()) <= 13


def test_an_urgent_request_would_rather_compute_than_wait() -> None:
    warm_but_busy = candidates(computed=[0.0, 1600.0], prefill_tokens=[1280, 0])
    policy = create_policy("priority")
    assert [policy.choose(Asked(160, priority=level), warm_but_busy).row for level in (-2.0, 0.0, 2.0)] == [0, 0, 1]


def test_a_temperature_spreads_choices_by_cost() -> None:
    policy, given_candidates = create_policy("overlap-load"), candidates(computed=[160.0, 320.0, 1600.0])
    asked = Asked(160, options={"router_temperature": 0.5})
    seed_choices(1)
    counts = Counter(policy.choose(asked, given_candidates).row for _ in range(4000))
    weights = [math.exp(-(cost - 10) / (0.5 * (100 - 10))) for cost in (10, 20, 100)]
    expected = [4000 * weight / sum(weights) for weight in weights]
    assert [counts[row] for row in range(3)] == pytest.approx(expected, abs=150)  # five standard deviations


def choose(policy: Any, *costs: float, **asked: Any) -> Choice:
    return policy.choose(Asked(160, **asked), candidates(computed=list(costs)))  # type: ignore[no-any-return]


def test_a_session_stays_until_another_worker_is_twice_as_cheap() -> None:
    policy = create_policy("session,overlap-load")
    assert choose(policy, 160.0, 320.0, session="a").row == 0
    assert choose(policy, 300.0, 160.0, session="a").row == 0
    assert choose(policy, 300.0, 160.0, session="b").row == 1
    assert choose(policy, 400.0, 160.0, session="a").row == 1
    assert choose(policy, 160.0, 200.0, session="a").row == 1
    assert choose(policy, 160.0, 200.0).row == 0
    assert choose(policy, 160.0, 200.0, session="a", now=9000.0).row == 0  # forgotten by then


def test_the_session_that_was_used_last_the_longest_time_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selection.policies._MAX_SESSIONS", 2)
    policy = create_policy("session,overlap-load")
    for session in ("a", "b", "a", "c"):
        assert choose(policy, 160.0, 320.0, session=session).row == 0
    assert [choose(policy, 300.0, 160.0, session=session).row for session in ("a", "c", "b")] == [0, 0, 1]


def test_a_hard_session_stays_while_its_worker_is_there() -> None:
    policy = create_policy("session-hard,overlap-load")
    assert choose(policy, 160.0, 320.0, session="a").row == 0
    assert choose(policy, 9000.0, 160.0, session="a").row == 0
    without = selected(candidates(computed=[160.0, 160.0]), [1])
    assert policy.choose(Asked(160, session="a"), without).row == 0
    assert choose(policy, 16.0, 9000.0, session="a").row == 1


@pytest.mark.parametrize("size", [2, 4, 10])
def test_a_cold_worker_gets_its_share(size: int) -> None:
    policy = create_policy("warm-up,overlap-load")
    costs, pages = [0.0] + [1600.0] * (size - 1), [1000] * (size - 1) + [10]
    counts = Counter(policy.choose(Asked(160), candidates(computed=costs, pages=pages)).row for _ in range(100 * size))
    assert abs(counts[size - 1] - 100) <= 1
    assert counts[0] == 100 * size - counts[size - 1]
    warm = candidates(computed=costs, pages=[1000] * size)
    assert {policy.choose(Asked(160), warm).row for _ in range(30)} == {0}


def test_prefill_goes_to_a_prefill_worker_unless_decode_holds_enough() -> None:
    policy = create_policy("prefill-decode,overlap-load")
    roles = ["prefill", "decode", "decode", "prefill"]
    choice = policy.choose(
        Asked(160), candidates(computed=[160.0, 160.0, 80.0, 40.0], predicted=[0, 0, 80, 120], roles=roles)
    )
    assert (choice.row, choice.prefill) == (2, 3)
    assert np.isinf(choice.costs[[0, 3]]).all()
    held = candidates(computed=[160.0, 160.0, 8.0, 40.0], predicted=[0, 0, 152, 120], roles=roles)
    assert policy.choose(Asked(160), held)[::3] == (2, None)
    both = candidates(computed=[160.0, 80.0])
    assert policy.choose(Asked(160), both)[::3] == (1, None)


def test_packages_offer_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "offered_policy.py").write_text(
        "import numpy as np\nfrom selection.candidates import Choice\n\n\nclass Last:\n"
        "    def choose(self, asked, candidates):\n"
        "        return Choice(len(candidates.workers) - 1, np.zeros(len(candidates.workers)), 'the last one')\n"
    )
    about = tmp_path / "offered-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[kvsight.policies]\nlast = offered_policy:Last\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert choose(create_policy("session,last"), 1.0, 2.0, 3.0).row == 2


@pytest.mark.parametrize("names", ["", "nope", "session", "nope,overlap-load", "overlap-load,lmetric"])
def test_an_unknown_policy_is_refused_and_named(names: str) -> None:
    with pytest.raises(InvalidValueError, match=r"^policy: got '"):
        create_policy(names)


def test_wrappers_and_policies_have_different_names() -> None:
    assert not POLICIES.keys() & WRAPPERS.keys()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_a_record_shows_the_cheapest_candidates_and_the_chosen_one(costs: list[int], data: st.DataObject) -> None:
    chosen, room = data.draw(st.integers(0, len(costs) - 1)), data.draw(st.integers(1, 16))
    rows = np.full(min(room, len(costs)), -1, np.int32)
    index = shown_rows(np.array(costs, float), chosen, rows)
    cheapest = sorted(range(len(costs)), key=costs.__getitem__)[:room] if room < len(costs) else [*range(len(costs))]
    if chosen not in cheapest:
        cheapest[-1] = chosen
    assert rows.tolist() == cheapest
    assert rows[index] == chosen
