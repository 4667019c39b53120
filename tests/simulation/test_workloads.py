"""Requests: generated workloads, Mooncake traces, and the prompt of simulated engines."""

import gzip
import json
from collections import defaultdict
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_events.errors import InvalidValueError
from simulation import MooncakeTrace, Request, WorkloadSettings, generate
from simulation.workload import DEMO_TOKENS, demo_prompt, engine_requests, kept_part
from tests.support.commands import invoke


def _by_session(requests: list[Request]) -> dict[str, list[Request]]:
    sessions: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        sessions[request.session].append(request)
    return sessions


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return generate(WorkloadSettings(num_requests=400, seed=3))


def test_equal_settings_give_as_many_equal_requests_in_order_of_arrival(requests: list[Request]) -> None:
    again, others = (generate(WorkloadSettings(num_requests=400, seed=seed)) for seed in (3, 4))
    assert len(requests) == 400
    for one, other in zip(requests, again, strict=True):
        assert (one.arrival_s, one.session) == (other.arrival_s, other.session)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.output_tokens, other.output_tokens)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals) != [request.arrival_s for request in others]


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


def test_sub_agents_start_together_with_the_context_of_their_agent() -> None:
    settings = WorkloadSettings(
        num_requests=2000, agent_share=1.0, subagent_share=0.2, subagents=3, sessions_per_s=0.05
    )
    requests = generate(settings)
    sessions = _by_session(requests)
    agents = [session for name, session in sessions.items() if name.startswith("agent")]
    starts: dict[float, list[Request]] = defaultdict(list)
    for name, (first, *_) in sessions.items():
        if name.startswith("subagent"):
            starts[first.arrival_s].append(first)
    assert len(starts) > 50
    for siblings in starts.values():
        assert len(siblings) == 3
        contexts = [np.concatenate((turn.token_ids, turn.output_tokens)) for agent in agents for turn in agent]
        shared = [
            max(len(each) for each in contexts if np.array_equal(each, sibling.token_ids[: len(each)]))
            for sibling in siblings
        ]
        assert len(set(shared)) == 1
        assert len({sibling.token_ids.tobytes() for sibling in siblings}) == 3
    assert {name.split("-")[0] for name in sessions} == {"agent", "subagent"}


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
        ("subagents", 0),
        ("subagent_share", 2.0),
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


GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}


def _trace(folder: Path, *lines: str) -> MooncakeTrace:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return MooncakeTrace(path)


def _line(**changes: object) -> str:
    return json.dumps(GOOD | changes)


def test_lines_become_requests_in_order_of_arrival_the_same_in_every_pass(tmp_path: Path) -> None:
    trace = _trace(tmp_path, _line(input_length=900, hash_ids=[4, 8], timestamp=2000), _line(), "")
    for _ in range(2):
        one, other = trace
        assert (one.arrival_s, other.arrival_s) == (1.5, 2.0)
        assert one.token_ids.dtype == np.uint32
        assert (len(one.token_ids), len(other.token_ids)) == (600, 900)
        assert (len(one.output_tokens), one.num_output) == (0, 7)
        np.testing.assert_array_equal(one.token_ids[:512], other.token_ids[:512])  # equal ids, equal tokens
    first, second = (next(iter(trace)) for _ in range(2))
    assert first.session == second.session
    np.testing.assert_array_equal(first.token_ids, second.token_ids)


def test_different_hash_ids_share_no_page_at_any_place(tmp_path: Path) -> None:
    ids = [*range(2000), 2**53 - 1, 2**53 - 2]
    (request,) = _trace(tmp_path, _line(hash_ids=ids, input_length=512 * len(ids)))
    pages = request.token_ids.reshape(-1, 16)
    assert len(np.unique(pages, axis=0)) == len(pages)


def test_gzip_is_read_like_plain_text_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(f"{_line()}\n\n{_line()}\n".encode()))
    assert len(MooncakeTrace(path)) == 2


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"timestamp": -1}, "timestamp", "-1"),
        ({"timestamp": "soon"}, "timestamp", "soon"),
        ({"timestamp": True}, "timestamp", "True"),
        ({"input_length": 0}, "input_length", "0"),
        ({"input_length": 1025}, "input_length", "1025"),
        ({"input_length": 2.5}, "input_length", "2.5"),
        ({"output_length": -3}, "output_length", "-3"),
        ({"output_length": 2**20 + 1}, "output_length", "1048577"),
        ({"output_length": None}, "output_length", "None"),
        ({"hash_ids": 17}, "hash_ids", "17"),
        ({"hash_ids": [1, -2]}, r"hash_ids\[1\]", "-2"),
        ({"hash_ids": [2**53, 2]}, r"hash_ids\[0\]", str(2**53)),
        ({"hash_ids": [1, "x"]}, r"hash_ids\[1\]", "x"),
        ({"hash_ids": []}, "input_length", "600"),
    ],
)
def test_a_bad_field_is_refused_with_line_name_and_value(
    tmp_path: Path, changes: dict[str, object], field: str, value: str
) -> None:
    with pytest.raises(InvalidValueError, match=rf"line 3: {field}: got '?{value}"):
        _trace(tmp_path, _line(), "", _line(**changes))


@pytest.mark.parametrize(
    "line", ["{", "[1]", "\udce4".encode("utf-8", "surrogateescape").decode("latin-1"), "null", "[" * 100_000]
)
def test_a_line_that_is_no_object_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidValueError, match="line 2"):
        _trace(tmp_path, _line(), line)


def test_a_missing_field_and_files_that_cannot_be_read_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # messages cut long paths
    with pytest.raises(InvalidValueError, match=r"line 1: hash_ids: got 'nothing'"):
        _trace(tmp_path, json.dumps({k: v for k, v in GOOD.items() if k != "hash_ids"}))
    for content in (None, b"not gzip", gzip.compress(_line().encode(), mtime=0)[:-12]):
        if content is not None:
            Path("trace.jsonl.gz").write_bytes(content)
        with pytest.raises(InvalidValueError, match=r"trace\.jsonl\.gz"):
            MooncakeTrace(Path("trace.jsonl.gz"))
    with pytest.raises(InvalidValueError, match="at least one request"):
        _trace(tmp_path, "")


def test_the_real_trace_is_read_whole(trace_path: Path) -> None:
    with gzip.open(trace_path) as file:
        lengths = [json.loads(line)["input_length"] for line in file]
    trace = MooncakeTrace(trace_path)
    assert len(trace) == len(lengths)
    assert sum(len(request.token_ids) for request in trace) == sum(lengths)


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
    printed = invoke("demo", "--prompt", "--model", "m").stdout
    query = msgspec.json.decode(printed)
    assert query == {"model_name": "m", "token_ids": demo_prompt().tolist()}
    assert printed.count("\n") == 1
