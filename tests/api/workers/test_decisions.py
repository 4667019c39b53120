"""POST /decisions without a server: what is recorded, what is refused, and that nothing waits."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from indexer.writing.queue import WriteQueue, WriteUnavailableError
from kv_events.decisions import Candidate, Decision, DecisionRecord, Outcome, decode_decision
from kv_events.hashing import namespace_seed, sequence_hashes, token_array
from kv_events.records import Channel, LogRecord
from tests.rigs.api import asking
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.loop_watch import check_turns
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 19))
DECIDED: dict[str, Any] = {"request_id": "r1", "model_name": "m", "token_ids": TOKENS, "worker": "w0"}
OUTCOME: dict[str, Any] = {"request_id": "r1", "cached_tokens": 8}


class Kept:
    """A sink that keeps records in memory, and can be away."""

    def __init__(self) -> None:
        self.written: list[LogRecord] = []
        self.is_away = False

    async def write(self, records: Sequence[LogRecord]) -> None:
        if self.is_away:
            raise WriteUnavailableError("away")
        self.written += records

    @property
    def records(self) -> list[DecisionRecord]:
        return [decode_decision(record.payload) for record in self.written]


class Rig:
    """A service with a worker w0 that holds nothing yet, of pages of 4 tokens."""

    def __init__(self, client: httpx.AsyncClient, sink: Kept, log: WriteQueue) -> None:
        self.client, self.sink, self.log = client, sink, log

    async def post(self, body: Any) -> httpx.Response:
        return await self.client.post("/decisions", json=body)

    async def kept(self, body: Any) -> list[DecisionRecord]:
        """Post a body that is accepted, and return what is written."""
        before = len(self.sink.written)
        answer = await self.post(body)
        assert answer.status_code == 202, answer.text
        expected = before + answer.json()["accepted"]
        await async_wait_until(lambda: len(self.sink.written) == expected, what="the records are written")
        return self.sink.records[before:]


@asynccontextmanager
async def rig(*, has_sink: bool = True, max_queued_bytes: int = 2**20, **settings: Any) -> AsyncIterator[Rig]:
    fed, sink = HandFed(), Kept()
    log = WriteQueue(sink.write if has_sink else None, max_queued_bytes=max_queued_bytes)
    app = create_app(LiveService(fed.consumer, ApiSettings(**settings), decisions=log))
    async with asking(app) as client:
        await fed.hold(Stream("w0"), [900, 901, 902, 903])
        yield Rig(client, sink, log)


def packed(seed: int = namespace_seed()) -> bytes:
    return sequence_hashes(token_array(TOKENS), 4, seed).tobytes()


async def test_a_decision_is_kept_with_the_hashes_of_its_prompt_and_without_its_tokens() -> None:
    fields = {
        "dp_rank": 0,
        "predicted_tokens": 8,
        "candidates": [{"worker": "w0", "dp_rank": 0, "tokens": 8, "score": 7.5}, {"worker": "w1"}],
        "timestamp": time.time() - 60,
    }
    async with rig() as service:
        (found,) = await service.kept({**DECIDED, **fields, "unknown": 1})
        record = service.sink.written[0]
    assert isinstance(found, Decision)
    assert (found.model, found.tenant, found.worker, found.dp_rank) == ("m", "default", "w0", 0)
    assert (found.block_size, found.prompt_tokens, found.predicted_tokens) == (4, 18, 8)
    assert found.sequence_hashes == packed()
    assert found.candidates == (Candidate("w0", 0, 8, 7.5), Candidate("w1", None, 0, 0.0))
    assert found.timestamp == fields["timestamp"]
    assert (record.channel, record.key) == (Channel.DECISIONS, b"r1")


async def test_an_outcome_is_kept() -> None:
    async with rig() as service:
        (found,) = await service.kept(OUTCOME)
    assert isinstance(found, Outcome)
    assert (found.request_id, found.cached_tokens) == ("r1", 8)
    assert abs(found.timestamp - time.time()) < 60


@pytest.mark.parametrize("form", ["json", "msgpack"])
async def test_prompts_are_given_as_in_queries(form: str) -> None:
    hashes = sequence_hashes(token_array(TOKENS), 4, namespace_seed())
    prompts: list[dict[str, Any]] = [
        {"model_name": "m", "seq_hashes": hashes.tobytes() if form == "msgpack" else hashes.tolist()},
        {"model": "m", "block_size": 4, "token_ids": TOKENS},
        {"model_name": "m", "token_ids": np.array(TOKENS, "<u4").tobytes() if form == "msgpack" else TOKENS},
    ]
    async with rig() as service:
        body = {"decisions": [{"request_id": str(n), "worker": "w0", **each} for n, each in enumerate(prompts)]}
        encode = msgspec.msgpack.encode if form == "msgpack" else msgspec.json.encode
        answer = await service.client.post(
            "/decisions", content=encode(body), headers={"content-type": f"application/{form}"}
        )
        assert (answer.status_code, answer.json()) == (202, {"accepted": 3, "dropped": 0})
        await async_wait_until(lambda: len(service.sink.written) == 3, what="the records")
        found = [each for each in service.sink.records if isinstance(each, Decision)]
    assert [each.sequence_hashes for each in found] == [packed()] * 3
    assert [(each.block_size, each.prompt_tokens) for each in found] == [(4, 16), (4, 18), (4, 18)]


async def test_adapters_salts_and_tenants_are_named_as_in_queries() -> None:
    async with rig() as service:
        salted = {**DECIDED, "lora_name": "a", "cache_salt": "s"}
        (found,) = await service.kept(salted)
        assert isinstance(found, Decision)
        assert found.sequence_hashes == packed(namespace_seed("a", "s"))
        (other,) = await service.kept({**DECIDED, "routing_group": "t"})
        assert isinstance(other, Decision)
        assert (other.tenant, other.block_size, other.sequence_hashes) == ("t", 0, b"")  # nobody has said its page size
        assert other.prompt_tokens == 18


async def test_decisions_and_outcomes_share_a_batch() -> None:
    async with rig() as service:
        found = await service.kept({"decisions": [DECIDED, OUTCOME]})
    assert [type(each) for each in found] == [Decision, Outcome]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({**DECIDED, "worker": 5}, 422, "worker"),
        ({**DECIDED, "worker": ""}, 422, "worker"),
        ({key: value for key, value in DECIDED.items() if key != "request_id"}, 422, "request_id"),
        ({**DECIDED, "request_id": "x" * 257}, 422, "request_id"),
        ({key: value for key, value in DECIDED.items() if key != "model_name"}, 422, "model_name"),
        ({**DECIDED, "dp_rank": -1}, 422, "dp_rank"),
        ({**DECIDED, "predicted_tokens": "many"}, 422, "predicted_tokens"),
        ({**DECIDED, "timestamp": 1.7e12}, 422, "timestamp"),
        ({**DECIDED, "token_ids": [1, -1]}, 422, "token_ids[1]"),
        ({**DECIDED, "candidates": [{"worker": "w"}] * 1025}, 422, "candidates"),
        ({**DECIDED, "candidates": [{"tokens": 1}]}, 422, "candidates[0].worker"),
        ({**OUTCOME, "cached_tokens": -1}, 422, "cached_tokens"),
        ({"decisions": [OUTCOME] * 1025}, 422, "decisions"),
        ({"decisions": [OUTCOME, {**OUTCOME, "cached_tokens": None}]}, 422, "decisions[1].cached_tokens"),
    ],
)
async def test_bad_input_is_named_and_nothing_of_it_is_recorded(body: Any, status: int, field: str) -> None:
    async with rig() as service:
        problem = check_problem(await service.post(body), status)
        assert problem["field"] == field
        assert service.log.accepted.total() == 0
        assert len(await service.kept(OUTCOME)) == 1


async def test_the_queue_is_bounded_and_nothing_waits_for_a_log_that_is_away() -> None:
    async with rig(max_queued_bytes=3000) as service:
        service.sink.is_away = True
        began = time.monotonic()
        answers = [(await service.post(OUTCOME)).json() for _ in range(50)]
        assert time.monotonic() - began < 30
        accepted = sum(answer["accepted"] for answer in answers)
        assert 0 < accepted < 3000 // 256  # small records, too, take memory
        assert sum(answer["dropped"] for answer in answers) == 50 - accepted
        text = (await service.client.get("/metrics")).text
        assert f'kvsight_decisions_dropped_total{{reason="queue_full"}} {50 - accepted}.0' in text
        assert f"kvsight_decisions_queued {accepted}.0" in text
        service.sink.is_away = False
        await async_wait_until(lambda: service.log.num_queued == 0, what="the queue is written")
        assert len(service.sink.written) == accepted == service.log.written
        assert f'kvsight_decisions_total{{kind="outcome"}} {accepted}.0' in (await service.client.get("/metrics")).text


async def test_what_is_queued_at_the_end_is_written() -> None:
    async with rig() as service:
        answers = await asyncio.gather(*(service.post({**OUTCOME, "request_id": str(n)}) for n in range(100)))
        assert {answer.status_code for answer in answers} == {202}
    assert len(service.sink.written) == 100


async def test_a_write_is_small_enough_to_be_done_in_seconds_however_much_waits() -> None:
    writes: list[tuple[int, int]] = []

    async def write(records: Sequence[LogRecord]) -> None:
        writes.append((len(records), sum(len(record.payload) for record in records)))

    log = WriteQueue(write)
    for number in range(5000):
        assert log.put(*[("decision", f"r{number}", bytes(100))] * (number % 3 + 1)) is None
    for number in range(100):
        assert log.put(("decision", f"l{number}", bytes(200_000))) is None
    async with log.running():
        await async_wait_until(lambda: not log.num_queued, what="all records")
    counts, sizes = zip(*writes, strict=True)
    assert (sum(counts), log.written) == (10_099, 10_099)
    assert max(counts) < 1003
    assert max(sizes) < 2**22 + 200_000


@pytest.mark.parametrize(("number", "said"), [(1, "1 decision"), (2, "2 decisions")])
async def test_the_last_line_says_what_was_not_written(
    number: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Kept()
    sink.is_away = True
    log = WriteQueue(sink.write)
    async with log.running():
        for _ in range(number):
            log.put(("decision", "r", b"x"))
    assert caplog.messages[-1] == f"not written before the end: {said}"


async def test_a_service_without_a_log_drops_and_counts_decisions() -> None:
    async with rig(has_sink=False) as service:
        answer = (await service.post(DECIDED)).json()
        assert (answer["accepted"], answer["dropped"]) == (0, 1)
        assert "start it with `kvsight serve --record FOLDER`" in answer["reason"]
        assert 'kvsight_decisions_dropped_total{reason="no_log"} 1.0' in (await service.client.get("/metrics")).text


async def test_a_large_prompt_is_kept_and_its_end_left_out() -> None:
    async with rig() as service:
        (found,) = await service.kept({**DECIDED, "token_ids": list(range(300_000))})
    assert isinstance(found, Decision)
    assert (found.prompt_tokens, len(found.sequence_hashes)) == (300_000, 8 * 65_536)


async def test_a_large_body_is_checked_and_encoded_without_holding_the_loop() -> None:
    candidates = [{"worker": f"worker-{number}", "tokens": 8, "score": 1.5} for number in range(1024)]
    body = msgspec.msgpack.encode({"decisions": [{**DECIDED, "candidates": candidates}] * 150})
    spent_s = [0.0]  # by all threads, in each run
    async with rig(max_queued_bytes=2**30) as service:

        async def post() -> None:
            headers, before = {"content-type": "application/msgpack"}, time.process_time()
            answer = await service.client.post("/decisions", content=body, headers=headers)
            assert answer.json() == {"accepted": 150, "dropped": 0}
            spent_s.append(time.process_time() - before)

        await check_turns(post, lambda turns: max(turns) < spent_s[-1] / 3)
