"""Generated workloads."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from kv_events.errors import InvalidValueError
from simulation import Request, WorkloadSettings, generate


def _by_session(requests: list[Request]) -> dict[str, list[Request]]:
    sessions: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        sessions[request.session].append(request)
    return sessions


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return generate(WorkloadSettings(num_requests=400, seed=3))


def test_equal_settings_give_equal_requests(requests: list[Request]) -> None:
    again = generate(WorkloadSettings(num_requests=400, seed=3))
    for one, other in zip(requests, again, strict=True):
        assert (one.arrival_s, one.session) == (other.arrival_s, other.session)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.output_tokens, other.output_tokens)


def test_another_seed_gives_other_requests(requests: list[Request]) -> None:
    other = generate(WorkloadSettings(num_requests=400, seed=4))
    assert [r.arrival_s for r in requests] != [r.arrival_s for r in other]


def test_there_are_as_many_requests_as_asked_for_in_order_of_arrival(requests: list[Request]) -> None:
    assert len(requests) == 400
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(requests))


def test_a_prompt_continues_the_prompt_and_answer_before_it(requests: list[Request]) -> None:
    followed = 0
    for session in _by_session(requests).values():
        for one, other in pairwise(session):
            context = np.concatenate((one.token_ids, one.output_tokens))
            np.testing.assert_array_equal(other.token_ids[: len(context)], context)
            assert len(other.token_ids) > len(context)
            followed += 1
    assert followed > 100


def test_sessions_share_system_prompts() -> None:
    requests = generate(WorkloadSettings(num_requests=300, num_system_prompts=3))
    beginnings = {session[0].token_ids[:32].tobytes() for session in _by_session(requests).values()}
    assert len(beginnings) <= 3 < len(_by_session(requests))


def test_agents_and_conversations_come_in_the_shares_asked_for() -> None:
    kinds = {
        share: {r.session.split("-")[0] for r in generate(WorkloadSettings(num_requests=200, agent_share=share))}
        for share in (0.0, 0.5, 1.0)
    }
    assert kinds == {0.0: {"chat"}, 0.5: {"chat", "agent"}, 1.0: {"agent"}}


def test_a_burst_begins_many_sessions_at_once_with_one_system_prompt() -> None:
    settings = WorkloadSettings(num_requests=60, burst_share=1.0, burst_sessions=40, sessions_per_s=0.001)
    firsts = [session[0] for session in _by_session(generate(settings)).values()][:40]
    assert firsts[-1].arrival_s - firsts[0].arrival_s <= 0.5
    assert len({first.token_ids[:32].tobytes() for first in firsts}) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_requests", 0),
        ("num_system_prompts", 0),
        ("burst_sessions", -1),
        ("agent_share", 1.5),
        ("burst_share", -0.1),
        ("seed", -1),
        ("sessions_per_s", 0),
        ("sessions_per_s", float("nan")),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=field):
        WorkloadSettings(**{field: value})  # type: ignore[arg-type]
