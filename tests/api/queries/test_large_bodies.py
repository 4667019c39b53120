"""Bodies that take long to decode: the results are the same, and other callers are answered in the meantime."""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from httpx import AsyncClient
from hypothesis import given, settings
from hypothesis import strategies as st

from api.problems import ProblemError
from api.queries.body_formats import JSON, LARGE_BYTES, MAX_FIELDS, MAX_OTHER_BYTES, MSGPACK, elements, number_slices
from api.queries.text import MAX_TEXT_OBJECTS
from tests.support.effort import num_examples
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.loop_watch import check_turns

AS_JSON = {"content-type": "application/json"}
TOKENS = list(range(100_000, 100_000 + 60_000))
BLOCK = 64
LONGEST_TURN_S = 0.02
"""CPU time. To decode 28 MiB at once takes longer."""
JUNK = st.recursive(
    st.integers(-(2**63), 2**64 - 1) | st.text() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def body(**fields: Any) -> bytes:
    data = json.dumps({"model_name": "m", **fields}).encode()
    assert len(data) > LARGE_BYTES
    return data


async def test_a_large_prompt_gets_the_answer_of_its_msgpack_form(client: AsyncClient, fed: HandFed) -> None:
    query = {"model_name": "m", "token_ids": TOKENS}
    await fed.hold(Stream("1", block_size=BLOCK), TOKENS)
    answer = (await client.post("/query", content=body(token_ids=TOKENS), headers=AS_JSON)).json()
    spaced = json.dumps(query, indent=1).encode()
    same = (await client.post("/query", content=spaced, headers=AS_JSON)).json()
    batch = json.dumps({"queries": [query, query]}).encode()
    both = (await client.post("/query/batch", content=batch, headers=AS_JSON)).json()["results"]
    held = len(TOKENS) // BLOCK * BLOCK
    assert answer["scores"] == same["scores"] == {"1": {"0": held}}
    assert [each["scores"] for each in both] == [{"1": {"0": held}}] * 2


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, "7", None, True, "a,b", [1, 2], {"a": [1, 2]}, 10**30])
@pytest.mark.parametrize("position", [0, 31_234, 60_000])
async def test_a_wrong_element_of_a_large_prompt_is_named(client: AsyncClient, wrong: Any, position: int) -> None:
    tokens = [*TOKENS[:position], wrong, *TOKENS[position:]]
    problem = check_problem(await client.post("/query", content=body(token_ids=tokens), headers=AS_JSON), 422)
    assert problem["field"] == f"token_ids[{position}]"
    assert "expected an integer in 0 .. 4294967295" in problem["detail"]
    assert len(problem["detail"]) < 300


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (lambda: {"token_ids": "x" * LARGE_BYTES}, "token_ids"),
        (lambda: {"token_ids": {str(n): n for n in TOKENS}}, "token_ids"),
        (lambda: {"token_ids": [], "lora_name": TOKENS}, "lora_name"),
        (lambda: {"token_ids": [], "tier_weights": {str(n): n for n in TOKENS}}, "tier_weights"),
        (lambda: {"token_ids": [1] * 4_194_305}, "len(token_ids)"),
        (lambda: {"x": TOKENS}, "token_ids"),
    ],
    ids=["text", "object", "adapter", "weights", "too many", "missing"],
)
async def test_whatever_is_wrong_with_a_large_body_is_a_422(
    client: AsyncClient, fields: Callable[[], dict[str, Any]], field: str
) -> None:
    check_problem(await client.post("/query", content=body(**fields()), headers=AS_JSON), 422, field=field)


async def test_a_large_body_that_is_cut_off_is_a_400(client: AsyncClient) -> None:
    check_problem(await client.post("/query", content=body(token_ids=TOKENS)[:-9], headers=AS_JSON), 400)


@pytest.mark.parametrize("data", [b"[" + b"1," * 500_000 + b"1]", b'"' + b"x" * 500_000 + b'"'])
async def test_a_large_batch_of_too_many_or_none_is_a_422(client: AsyncClient, data: bytes) -> None:
    response = await client.post("/query/batch", content=b'{"queries":' + data + b"}", headers=AS_JSON)
    assert "queries" in check_problem(response, 422)["field"]


BYTES = 28 * 2**20


def many() -> bytes:
    return b"123456," * (BYTES // 7) + b"1"


UNUSUAL: list[Callable[[], bytes]] = [
    lambda: b'"token_ids":[1],"x":[' + b",".join([b"[" * 500 + b"]" * 500] * (BYTES // 1001)) + b"]",
    lambda: b'"token_ids":[1],"x":[' + many() + b"]",
    lambda: b'"token_ids":[1],"x":{' + b'"y":"\\u0041",' * (BYTES // 13) + b'"y":1}',
    lambda: b'"token_ids":[1],"lora_name":"' + b"x" * BYTES + b'"',
    lambda: b'"token_ids":["' + b"x" * BYTES + b'"]',
    lambda: b'"token_ids":[0.' + b"1" * BYTES + b"]",
    lambda: b'"token_ids":[' + many()[: BYTES // 2] + b',"x"]',
    lambda: b'"token_ids":[1],"tier_weights":[' + many() + b"]",
    lambda: b'"token_ids":[1]' + b" " * BYTES,
    lambda: b",".join([b'"x":1'] * (BYTES // 6)),
]
encode = msgspec.msgpack.encode


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("/query", lambda: body(token_ids=TOKENS * 60)),
        ("/query", lambda: body(token_ids=[*(TOKENS * 60), "x"])),
        ("/query/batch", lambda: b'{"queries":[' + b"1," * (BYTES // 2) + b"1]}"),
        ("/query/batch", lambda: b'{"queries":[{"model_name":"m","token_ids":[' + many() + b"]}]}"),
        *(("/query", lambda fields=fields: b'{"model_name":"m",' + fields() + b"}") for fields in UNUSUAL),
        ("/query", lambda: encode({"model_name": "m", "token_ids": TOKENS * 60})),
        ("/query", lambda: encode({"model_name": "m", "token_ids": [1], "x": [1] * BYTES})),
        ("/query/batch", lambda: encode({"queries": [{"model_name": "m", "token_ids": TOKENS * 60}]})),
    ],
    ids=itertools.count(),
)
async def test_other_callers_are_not_kept_waiting(
    client: AsyncClient, fed: HandFed, path: str, make: Callable[[], bytes]
) -> None:
    data = make()
    kind = "json" if data.startswith(b"{") else "msgpack"
    await fed.hold(Stream("1", block_size=BLOCK), TOKENS)

    async def ask() -> None:
        answer = await client.post(path, content=data, headers={"content-type": f"application/{kind}"})
        assert answer.status_code in (200, 422)

    await check_turns(ask, lambda turns: max(turns) < LONGEST_TURN_S, time.process_time)


@pytest.mark.parametrize("form", [msgspec.json, msgspec.msgpack])
async def test_only_lists_of_queries_may_be_large(client: AsyncClient, fed: HandFed, form: Any) -> None:
    headers = {"content-type": f"application/{form.__name__.rpartition('.')[2]}"}
    query = {"model_name": "m", "token_ids": TOKENS}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"x": "y" * MAX_OTHER_BYTES}, "x"),
        ({"lora_name": "y" * MAX_OTHER_BYTES}, "lora_name"),
        ({f"x{number}": 1 for number in range(MAX_FIELDS)}, "body"),
        ({"token_ids": [*TOKENS, -1]}, f"token_ids[{len(TOKENS)}]"),
        ({"token_ids": [*TOKENS, ["x" * LARGE_BYTES]]}, "token_ids"),
    ]
    await fed.hold(Stream("1", block_size=BLOCK), TOKENS)
    for more, field in wrong:
        asked = {**query, **more}
        problem = check_problem(await client.post("/query", content=form.encode(asked), headers=headers), 422)
        assert problem["field"] == field
        batch = form.encode({"queries": [asked, query]})
        refused, answered = (await client.post("/query/batch", content=batch, headers=headers)).json()["results"]
        assert refused["detail"] == problem["detail"]
        assert answered["scores"]
    at_most = check_problem(
        await client.post("/query", content=form.encode({**query, **wrong[0][0]}), headers=headers), 422
    )
    assert f"at most {MAX_OTHER_BYTES} bytes" in at_most["detail"]
    kept = {**query, "x": "y" * (MAX_OTHER_BYTES - 1000)}
    assert (await client.post("/query", content=form.encode(kept), headers=headers)).status_code == 200


def objects(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(objects, value.values()))
    return 1 + sum(map(objects, value)) if isinstance(value, list) else int(isinstance(value, str))


@settings(max_examples=num_examples(30))
@given(JUNK, st.sampled_from([None, 1]))
def test_objects_are_counted(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    for form, data in ((JSON, text), (MSGPACK, msgspec.msgpack.encode(value))):
        assert form.count_objects(np.frombuffer(data, np.uint8)) == objects(value)


@pytest.mark.parametrize("path", ["/query", "/select", "/potential_loads"])
@pytest.mark.parametrize("part", [[], {}, "a", {"content": [{}]}])
async def test_a_body_with_text_has_few_objects(client: AsyncClient, fed: HandFed, path: str, part: Any) -> None:
    """To make an object for each part of 8 MiB would stop all other callers for a second."""
    await fed.hold(Stream("1"), TOKENS[:BLOCK])
    for form, kind in ((JSON, "json"), (MSGPACK, "msgpack")):
        headers = {"content-type": f"application/{kind}"}
        for number, field in ((MAX_TEXT_OBJECTS + 1, "body"), (MAX_TEXT_OBJECTS // 8, "messages[0]")):
            parts = [part] * number
            asked = {"model_name": "m", "messages": [parts], "x": "y" * LARGE_BYTES}
            check_problem(await client.post(path, content=form.encode(asked), headers=headers), 422, field=field)


@settings(max_examples=num_examples(30))
@given(st.lists(JUNK, max_size=12), st.sampled_from([None, 1]))
def test_elements_are_those_of_the_array(values: list[Any], indent: int | None) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    for form, data, decode in (
        (JSON, text, json.loads),
        (MSGPACK, msgspec.msgpack.encode(values), msgspec.msgpack.decode),
    ):
        found = [decode(bytes(each)) for each in elements("queries", memoryview(data), form, 12)]
        assert found == decode(data)
        if len(values) > 1:
            with pytest.raises(ProblemError, match="at most"):
                elements("queries", memoryview(data), form, len(values) - 1)


@given(st.lists(st.integers(-(2**63), 2**64 - 1)), st.sampled_from([None, 1]))
def test_slices_are_the_numbers_of_the_array(values: list[int], indent: int | None) -> None:
    numbers = [0, *values] * 1000
    for form, data in ((JSON, json.dumps(numbers, indent=indent).encode()), (MSGPACK, msgspec.msgpack.encode(numbers))):
        parts = number_slices("x", memoryview(data), form, "integers")
        assert [n for part in parts for n in part] == numbers
