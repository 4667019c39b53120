"""What `explain` says to somebody on call, for causes that are planted in a log."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_events.decisions import VERSION, Decision, encode_decision
from kv_events.hashing import namespace_seed, sequence_hashes
from kv_events.http.parsed_query import ParsedQuery
from kv_events.http.queries import MediaSpan
from kv_events.records import Channel, LogRecord
from kv_events.schema import MEDIA, PackedStored, SnapshotBegin
from tests.support.commands import printed
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, removed, stored, words

START = 1_700_000_000.0
SIZE = 16
TOKENS = list(range(1000, 1000 + 8 * SIZE))
HASHES: list[int] = sequence_hashes(np.array(TOKENS, np.uint32), SIZE).tolist()


class Log:
    """A log of one worker or several, whose batches are an eighth of a second apart."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.records, self.now = folder, list[LogRecord](), START
        self.engine = self.stream("engine-0")

    def stream(self, worker: str) -> Stream:
        return Stream(worker, block_size=SIZE)

    def send(self, *events: Any, stream: Stream | None = None, **options: Any) -> "Log":
        self.now += 0.125
        self.records.append((stream or self.engine).batch(*events, now=self.now, **options))
        return self

    def decide(self, name: str, hashes: list[int], worker: str) -> "Log":
        self.now += 0.125
        made = Decision(
            VERSION, name, self.now, "m", "default", SIZE, len(hashes) * SIZE, words(hashes), worker, None, 0, ()
        )
        record = LogRecord(0, 0, int(self.now * 1000), name.encode(), encode_decision(made), Channel.DECISIONS)
        self.records.append(record)
        return self

    def explained(self, *options: object, **body: Any) -> dict[str, Any]:
        """What the command says of engine-0, as JSON."""
        write_log(self.folder, self.records)
        prompt = self.folder.with_suffix(".json")
        prompt.write_bytes(msgspec.json.encode({"model_name": "m", "token_ids": TOKENS, **body}))
        (worker,) = printed("explain", self.folder, "--prompt", prompt, "--worker", "engine-0", *options)["workers"]
        return dict(worker)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


def with_tokens(tokens: list[int], name: str | None = None) -> PackedStored:
    """The store of a prompt, with its tokens and its name, under block hashes that are nobody's."""
    hashes = sequence_hashes(np.array(tokens, np.uint32), SIZE, namespace_seed(name)).tolist()
    event = stored((0, hashes))
    data = np.array(tokens, "<u4").tobytes()
    return PackedStored(
        MEDIA[0], event.sequence_hashes, words(range(len(hashes))), event.chain_starts, event.parents, data, name
    )


def test_names_in_records_with_tokens_are_tried(log: Log) -> None:
    log.send().send(with_tokens(TOKENS, "sql"))
    found = log.explained()["findings"][0]
    assert (found["cause"], found["namespace"]) == ("other_namespace", {"lora_name": "sql"})


def test_a_prompt_with_an_image_is_looked_for_by_the_hashes_of_its_pages(log: Log) -> None:
    image = MediaSpan(hash="image-1", offset=SIZE, length=SIZE)
    query = ParsedQuery("m", "default", "token_ids", media=(image,))
    log.send(stored((0, query.hashes(np.array(TOKENS, np.uint32), SIZE).tolist())))
    assert log.explained(media=[image])["cause"] == "held"


def test_without_tokens_the_log_cannot_know_other_names(log: Log) -> None:
    """As a bridge publishes pages under an adapter: no tokens, no names."""
    hashes = sequence_hashes(np.array(TOKENS, np.uint32), SIZE, namespace_seed(lora_name="sql")).tolist()
    log.send(stored((0, hashes)))
    found = log.explained()["findings"][0]
    assert found["cause"] == "never_stored"
    assert "no LoRA adapter and no cache salt: whether the 8 pages that it holds are of other ones" in found["text"]
    assert log.explained(lora_name="sql")["cause"] == "held"


def test_a_page_that_is_stored_a_moment_later_is_named_with_its_time(log: Log) -> None:
    log.send(stored((0, HASHES[:3]))).send(stored((HASHES[2], HASHES[3:])))
    found = log.explained("--at", f"@{START + 0.2}")["findings"][0]
    assert (found["cause"], found["page"], found["evidence"][0]["batch"]["index"]) == ("stored_later", 4, 1)
    assert "it is stored at 2023-11-14T22:13:20.250Z (record 1, batch 1), 0.050 s after this moment" in found["text"]


def test_another_prompt_is_told_from_this_one_by_its_first_other_token(log: Log) -> None:
    log.send().send(with_tokens([*TOKENS[:36], *range(60)]))
    found = log.explained()["findings"][0]
    assert (found["cause"], found["page"], found["pages"]) == ("other_prompt", 3, 1)
    assert "Of other prompts, 1 page follows page 2 here." in found["text"]
    assert "Another prompt parts at token 37, inside page 3." in found["text"]


def test_the_worker_that_holds_most_is_named_with_the_decision_that_sent_it_there(log: Log) -> None:
    other = log.stream("engine-1")
    log.send(stored((0, HASHES[:2]))).send(stream=other).decide("r-7", HASHES, "engine-1")
    log.send(stored((0, HASHES)), stream=other)
    never, elsewhere = log.explained()["findings"]
    assert never["cause"] == "never_stored"
    assert "No page follows page 2 here." in never["text"]
    assert (elsewhere["worker"], elsewhere["pages"], elsewhere["request_id"]) == ("engine-1", 8, "r-7")
    assert "engine-1 holds most of the prompt, 8 of 8 pages: request r-7 was sent there at" in elsewhere["text"]


@pytest.mark.parametrize(
    ("reason", "means"),
    [("engine not heard", "some of these pages may be gone"), ("batches lost: 4", "others may be missing")],
)
def test_a_prompt_held_by_a_stale_view_may_be_gone(log: Log, reason: str, means: str) -> None:
    log.send(stored((0, HASHES)))
    for _ in range(5):
        log.send(degraded_reason=reason)
    worker = log.explained()
    assert (worker["cause"], worker["state"]) == ("held", "stale")
    _, doubt = worker["findings"]
    assert doubt["evidence"][0]["batch"]["index"] == 1
    assert f"({reason}) since 2023-11-14T22:13:20.250Z (record 1, batch 1)" in doubt["text"]
    assert means in doubt["text"]


@pytest.mark.parametrize("moment", [0.4, 0.7, 1.2])
def test_a_degraded_view_is_stale_since_the_first_batch_that_says_so(log: Log, moment: float) -> None:
    log.send(stored((0, HASHES[:2]))).send()
    for number in range(8):
        log.send(degraded_reason=f"batches lost: {number + 1}")
    found = log.explained("--at", f"@{START + moment}")["findings"][0]
    assert found["evidence"][0]["batch"]["index"] == 2
    assert "since 2023-11-14T22:13:20.375Z (record 2, batch 2)" in found["text"]


def test_a_wrong_block_size_comes_with_its_remedy(log: Log) -> None:
    log.send().send(degraded_reason="block size 32, registered with 16")
    text = log.explained()["findings"][0]["text"]
    assert "The engine's pages have 32 tokens: register it again with `block_size` 32, or without." in text


@pytest.mark.parametrize("is_plain", [True, False])
def test_an_eviction_names_what_took_its_place_a_moment_later(log: Log, is_plain: bool) -> None:
    taker = [77, 78, 79]
    log.send().send(stored((0, HASHES))).decide("r-9", taker, "engine-0").send(removed(HASHES[5:]))
    if not is_plain:
        log.send(degraded_reason="replaying")
    log.send(stored((0, taker))).send(stored((0, [99]))).decide("r-10", taker, "engine-0")
    found = log.explained()["findings"][0]
    assert (found["cause"], found["page"], found["request_id"]) == ("evicted", 6, "r-9")
    assert f"3 pages took the place at 2023-11-14T22:13:20.{625 if is_plain else 750}Z" in found["text"]
    assert (
        f"The first one stored is {77:016x}, of request r-9. The worker held 8 pages before, and 8 after."
        in found["text"]
    )


def test_a_page_that_went_down_the_tiers_names_each(log: Log) -> None:
    log.send().send(stored((0, HASHES))).send(stored((0, HASHES), tier=1)).send(removed(HASHES))
    log.send(removed(HASHES, tier=1))
    found = log.explained()["findings"][0]
    assert [(each["what"], each["medium"]) for each in found["evidence"]] == [
        ("stored", "GPU"), ("removed", "GPU"), ("removed", "CPU_PINNED"),
    ]  # fmt: skip
    assert "evicted from CPU_PINNED" in found["text"]
    assert "It had left GPU at 2023-11-14T22:13:20.500Z (record 3, batch 3)." in found["text"]


def test_a_page_that_was_not_resent_names_the_batch_that_was_lost_before(log: Log) -> None:
    log.send().send(stored((0, HASHES)))
    log.engine.batch(removed(HASHES[4:]), now=log.now)  # it is lost
    log.send(SnapshotBegin("gap"))
    log.records.append(log.engine.resync(now=log.now))
    found = log.explained()["findings"][0]
    assert (found["cause"], found["page"]) == ("not_resent", 5)
    assert "Before it, batch 2 was lost between record 1, batch 1 and record 2, batch 3" in found["text"]
    assert [each["what"] for each in found["evidence"]] == ["stored", "before_gap", "after_gap", "resync_ended"]
