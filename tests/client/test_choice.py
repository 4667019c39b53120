"""The rule that chooses a worker."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from kv_events.errors import InvalidValueError
from kv_events.http.queries import PeerAnswer, PeerInstance
from kvsight import WorkerChoice, best_worker


def held(tokens: int, dp: dict[int, int] | None = None, weighted: float | None = None, **more: Any) -> PeerInstance:
    ranks = {0: tokens} if dp is None else dp
    return PeerInstance(
        longest_matched=tokens,
        gpu=max(ranks.values(), default=0),
        dp=ranks,
        cpu=tokens,
        disk=tokens,
        external=tokens,
        state="live",
        age_ms=0,
        weighted=UNSET if weighted is None else weighted,
        **more,
    )


def answer(**instances: PeerInstance) -> PeerAnswer:
    return PeerAnswer(scores={}, instances=instances)


RULES: dict[str, tuple[PeerAnswer, dict[str, Any] | None, WorkerChoice | None]] = {
    "the longest prefix": (answer(a=held(16), b=held(32)), None, WorkerChoice("b", 0, 32, 32.0)),
    "weights": (answer(a=held(16, weighted=16.0), b=held(32, weighted=8.0)), None, WorkerChoice("a", 0, 16, 16.0)),
    "a load below the gain": (answer(a=held(64), b=held(32)), {"a": 31, "b": 0}, WorkerChoice("a", 0, 64, 33.0)),
    "a load above it": (answer(a=held(64), b=held(32)), {"a": 33, "b": 0}, WorkerChoice("b", 0, 32, 32.0)),
    "only loads are candidates": (answer(gone=held(64), b=held(32)), {"b": 1000}, WorkerChoice("b", 0, 32, -968.0)),
    "an idle one": (answer(b=held(32)), {"b": 1000, "idle": 0}, WorkerChoice("idle", None, 0, 0.0)),
    "an infinite load": (answer(), {"a": float("inf"), "b": np.float64(1)}, WorkerChoice("b", None, 0, -1.0)),
    "nobody holds it": (answer(), None, None),
    "no candidate": (answer(a=held(16)), {}, None),
}
A_RANK: dict[str, tuple[PeerInstance, WorkerChoice]] = {
    "most on any tier": (held(64, {0: 0, 1: 0}, matched_dp={0: 4, 1: 64}), WorkerChoice("a", 1, 64, 64.0)),
    "though less on the device": (held(64, {0: 16, 1: 0}, matched_dp={0: 16, 1: 64}), WorkerChoice("a", 1, 64, 64.0)),
    "the worth of the best rank": (
        held(16, {0: 12, 1: 0}, 13.0, matched_dp={0: 12, 1: 16}, weighted_dp={0: 12.0, 1: 4.0}),
        WorkerChoice("a", 0, 12, 12.0),
    ),
    "equal: the lowest": (held(64, {3: 64, 2: 64}), WorkerChoice("a", 2, 64, 64.0)),
    "equal: the device": (
        held(64, {0: 8, 1: 16, 2: 16}, matched_dp={0: 64, 1: 64, 2: 64}),
        WorkerChoice("a", 1, 64, 64.0),
    ),
    "equal: the tokens": (
        held(64, {0: 0, 1: 0}, 16.0, matched_dp={0: 32, 1: 64}, weighted_dp={0: 16.0, 1: 16.0}),
        WorkerChoice("a", 1, 64, 16.0),
    ),
    "unknown": (held(64, {0: 0, 1: 0}), WorkerChoice("a", None, 64, 64.0)),
    "unknown beside less": (held(64, {0: 16, 1: 0}), WorkerChoice("a", None, 64, 64.0)),
    "no ranks": (held(64, {}), WorkerChoice("a", None, 64, 64.0)),
    "weights of no rank": (held(64, {0: 64, 1: 64}, 64.0), WorkerChoice("a", None, 64, 64.0)),
    "nothing matched": (held(64, {0: 0, 1: 0}, 64.0, matched_dp={}), WorkerChoice("a", None, 64, 64.0)),
}


@pytest.mark.parametrize("name", RULES)
def test_the_highest_score_wins(name: str) -> None:
    found, load, expected = RULES[name]
    assert best_worker(found, load) == expected


@pytest.mark.parametrize("name", A_RANK)
def test_the_most_valuable_rank_is_named_if_the_answer_tells_which_it_is(name: str) -> None:
    instance, expected = A_RANK[name]
    assert best_worker(answer(a=instance)) == expected


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_ties_go_to_less_load_then_more_tokens_then_the_first_name(order: tuple[str, ...]) -> None:
    def choose(tokens: dict[str, int], load: dict[str, float] | None, **more: Any) -> WorkerChoice | None:
        found = answer(**{name: held(tokens[name], **more) for name in order})
        return best_worker(found, load and {name: load[name] for name in order})

    assert choose({"a": 32, "b": 16, "c": 16}, {"a": 32, "b": 16, "c": 17}) == WorkerChoice("b", 0, 16, 0.0)
    assert choose({"a": 16, "b": 16, "c": 8}, {"a": 0, "b": 0, "c": 0}) == WorkerChoice("a", 0, 16, 16.0)
    assert choose({"a": 8, "b": 16, "c": 16}, None, weighted=8.0) == WorkerChoice("b", 0, 16, 8.0)


@pytest.mark.parametrize("wrong", [float("nan"), "12", None, [1], {"a": 1}, 1j])
def test_a_load_that_is_no_number_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"load\['a'\]: got .*, expected a number"):
        best_worker(answer(), {"b": 0.0, "a": wrong})


@pytest.mark.parametrize(
    ("wrong", "named"), [(["a"], r"\['a'\]"), ("a", "'a'"), (5, "5"), ({7: 1.0}, "7"), ({None: 1.0}, "None")]
)
def test_a_load_that_maps_no_names_is_refused(wrong: Any, named: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"load: got {named}, expected"):
        best_worker(answer(), wrong)
