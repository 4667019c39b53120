"""The rule that chooses a worker."""

from __future__ import annotations

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


def test_the_longest_prefix_wins() -> None:
    assert best_worker(answer(a=held(16), b=held(32))) == WorkerChoice("b", 0, 32, 32.0)


def test_weights_decide_where_they_were_asked_for() -> None:
    assert best_worker(answer(a=held(16, weighted=16.0), b=held(32, weighted=8.0))) == WorkerChoice("a", 0, 16, 16.0)


def test_work_that_waits_counts_against_tokens_held() -> None:
    found = answer(a=held(64), b=held(32))
    assert best_worker(found, {"a": 31, "b": 0}) == WorkerChoice("a", 0, 64, 33.0)
    assert best_worker(found, {"a": 33, "b": 0}) == WorkerChoice("b", 0, 32, 32.0)


def test_only_workers_with_a_load_are_candidates() -> None:
    found = answer(gone=held(64), b=held(32))
    assert best_worker(found, {"b": 1000, "idle": 0}) == WorkerChoice("idle", None, 0, 0.0)
    assert best_worker(found, {"b": 1000}) == WorkerChoice("b", 0, 32, -968.0)


def test_without_a_candidate_there_is_no_choice() -> None:
    assert best_worker(answer()) is None
    assert best_worker(answer(a=held(16)), {}) is None


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_ties_go_to_less_load_then_more_tokens_then_the_first_name(order: tuple[str, ...]) -> None:
    def choose(tokens: dict[str, int], load: dict[str, float]) -> str:
        chosen = best_worker(
            answer(**{name: held(tokens[name]) for name in order}), {name: load[name] for name in order}
        )
        assert chosen is not None
        return chosen.worker

    assert choose({"a": 32, "b": 16, "c": 16}, {"a": 32, "b": 16, "c": 17}) == "b"
    assert choose({"a": 16, "b": 16, "c": 8}, {"a": 0, "b": 0, "c": 0}) == "a"
    found = answer(**{name: held({"a": 8, "b": 16, "c": 16}[name], weighted=8.0) for name in order})
    assert best_worker(found) == WorkerChoice("b", 0, 16, 8.0)


def test_the_rank_that_holds_most_is_meant() -> None:
    lower = held(64, {0: 0, 1: 0}, matched_dp={0: 4, 1: 64})
    assert best_worker(answer(a=lower)) == WorkerChoice("a", 1, 64, 64.0)
    device = held(64, {0: 16, 1: 0}, matched_dp={0: 16, 1: 64})
    assert best_worker(answer(a=device)) == WorkerChoice("a", 1, 64, 64.0)


def test_a_worker_is_worth_what_its_best_rank_is_worth() -> None:
    ranks: dict[str, Any] = {"matched_dp": {0: 12, 1: 16}, "weighted_dp": {0: 12.0, 1: 4.0}}
    divided = held(16, {0: 12, 1: 0}, weighted=13.0, **ranks)
    assert best_worker(answer(a=divided)) == WorkerChoice("a", 0, 12, 12.0)


def test_ranks_that_are_worth_the_same_go_by_tokens_then_by_the_device_then_by_number() -> None:
    equal = held(64, {3: 64, 2: 64})
    assert best_worker(answer(a=equal)) == WorkerChoice("a", 2, 64, 64.0)
    by_device = held(64, {0: 8, 1: 16, 2: 16}, matched_dp={0: 64, 1: 64, 2: 64})
    assert best_worker(answer(a=by_device)) == WorkerChoice("a", 1, 64, 64.0)
    ranks: dict[str, Any] = {"matched_dp": {0: 32, 1: 64}, "weighted_dp": {0: 16.0, 1: 16.0}}
    by_tokens = held(64, {0: 0, 1: 0}, weighted=16.0, **ranks)
    assert best_worker(answer(a=by_tokens)) == WorkerChoice("a", 1, 64, 16.0)


@pytest.mark.parametrize(
    "silent",
    [
        held(64, {0: 0, 1: 0}),
        held(64, {0: 16, 1: 0}),
        held(64, {}),
        held(64, {0: 64, 1: 64}, weighted=64.0),
        held(64, {0: 0, 1: 0}, matched_dp={}, weighted=64.0),
    ],
)
def test_no_rank_is_named_where_the_answer_does_not_tell_which_it_is(silent: PeerInstance) -> None:
    assert best_worker(answer(a=silent)) == WorkerChoice("a", None, 64, 64.0)


@pytest.mark.parametrize("wrong", [float("nan"), "12", None, [1], {"a": 1}, 1j])
def test_a_load_that_is_no_number_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"load\['a'\]: got .*, expected a number"):
        best_worker(answer(), {"b": 0.0, "a": wrong})


def test_an_infinite_load_excludes_a_worker() -> None:
    assert best_worker(answer(), {"a": float("inf"), "b": np.float64(1)}) == WorkerChoice("b", None, 0, -1.0)


@pytest.mark.parametrize(
    ("wrong", "named"), [(["a"], r"\['a'\]"), ("a", "'a'"), (5, "5"), ({7: 1.0}, "7"), ({None: 1.0}, "None")]
)
def test_a_load_that_maps_no_names_is_refused(wrong: Any, named: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"load: got {named}, expected"):
        best_worker(answer(), wrong)
