"""Answers written by the kernel equal those that msgspec writes for the structs, byte for byte."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.fast.writer import AnswerWriter, prompt_of
from api.queries.answers import encode_answer
from indexer.freshness import Freshness
from indexer.namespaces import Namespace, Namespaces
from indexer.scores import score_all
from indexer.settings import IndexerSettings
from indexer.views import View, ViewState
from kv_events.codec import StoredPages
from kv_events.http.parsed_query import ParsedQuery
from kv_events.schema import CLOSED
from kv_events.streams import DEFAULT_TENANT, StreamId, group_model
from tests.support.effort import num_examples

NOW = 1.7e9 + 0.123456
TICK = 1000.0
TTL_S = 10.0
PROMPT = np.arange(1, 9, dtype=np.uint64)
GROUP = "mamba"
WEIGHTS = [None, (1.0, 0.5, 0.25, 0.1), (1.0, 0.0, 0.0, 0.0), (0.8, 0.7, 1e6, 0.001), (1 / 3, 0.1, 0.1, 0.1)]

names = st.sampled_from(["a", "b", 'quo"te', "back\\slash", "ü\n", "engine-0.example:8000/x", "c" * 200])
ages = st.sampled_from([-3.0, 0.0, 0.0005, 0.0015, 0.0123, 7.9, 86_400.0]) | st.floats(0, 1000)
ticks = st.sampled_from([-math.inf, TICK, TICK - 2.4, TICK - 2.6, TICK - TTL_S, TICK - TTL_S - 0.1])
reasons = st.sampled_from(["", "", "queue overflow", CLOSED])
held = st.lists(st.integers(0, len(PROMPT)), min_size=4, max_size=4)
batch_states = st.sampled_from([ViewState.LIVE, ViewState.SYNCING, ViewState.STALE])
streams = st.tuples(names, st.integers(0, 3), held, batch_states, ages, ticks, reasons, st.none() | st.integers(0, 8))


def fill(view: View, pages: int, tier: int) -> None:
    """Store the first pages of the prompt on a tier."""
    starts = np.ones(1, np.uint8)
    event = StoredPages(tier, PROMPT[:pages], PROMPT[:pages], starts, np.zeros(1, np.uint64))
    view.index.store(view.number, event, 0, pages)


def namespace_of(rows: list[tuple[Any, ...]]) -> Namespace:
    """Return a namespace with a view for each row, some with a group stream, after views have come and gone."""
    namespaces = Namespaces(IndexerSettings.ignoring_environment())
    gone = [namespaces.add_view(StreamId("m", DEFAULT_TENANT, f"gone-{n}", 0), 16) for n in range(len(rows) // 2)]
    for worker, rank, held, state, age_s, tick, reason, group_pages in rows:
        stream = StreamId("m", DEFAULT_TENANT, worker, rank)
        if namespaces.view(stream) is not None:
            continue
        view = namespaces.add_view(stream, 16)
        for tier, pages in enumerate(held):
            fill(view, pages, tier)
        view.state, view.last_batch_at, view.last_batch_tick, view.degraded_reason = state, NOW - age_s, tick, reason
        if group_pages is not None:
            group = namespaces.add_view(stream._replace(model=group_model("m", GROUP)), 16)
            fill(group, group_pages, 0)
            group.last_batch_tick, group.state = tick, state
    for view in gone:
        list(namespaces.forget(view.stream))
    found = namespaces.find("m", DEFAULT_TENANT)
    return found[0] if found else namespaces.add_namespace("m", DEFAULT_TENANT, 16)


def freshness_of(*, is_catching_up: bool, outage: bool) -> Freshness:
    freshness = Freshness(TTL_S, 0.0, clock=lambda: TICK)
    freshness.note_log_read(TICK - (0.0 if outage else 1.0))
    freshness.note_log_read(TICK)
    freshness.is_catching_up = is_catching_up
    return freshness


def question_of(weights: tuple[float, ...] | None, *, is_peer: bool) -> ParsedQuery:
    block_size = None if is_peer else 16
    return ParsedQuery("m", DEFAULT_TENANT, "seq_hashes", None, None, False, weights, is_peer, block_size, None)


writer = AnswerWriter()


def both(namespace: Namespace, question: ParsedQuery, freshness: Freshness) -> tuple[bytes | None, bytes]:
    """Return the answer of the kernel and that of msgspec."""
    scores = score_all([namespace], lambda _: PROMPT, freshness)
    written = writer.write(question, prompt_of(question, PROMPT), namespace, freshness, NOW)
    return written, encode_answer(question, scores, NOW)


@settings(max_examples=num_examples(600))
@given(st.lists(streams, max_size=12), st.sampled_from(WEIGHTS), st.booleans(), st.booleans())
def test_the_text_of_both_dialects(
    rows: list[tuple[Any, ...]], weights: tuple[float, ...] | None, is_catching_up: bool, outage: bool
) -> None:
    namespace, freshness = namespace_of(rows), freshness_of(is_catching_up=is_catching_up, outage=outage)
    for is_peer in (True, False):
        written, expected = both(namespace, question_of(weights, is_peer=is_peer), freshness)
        if written is None:
            assert weights is not None
        else:
            assert written == expected


@pytest.mark.parametrize("weights", [None, (1.0, 0.8, 0.5, 0.25)])
def test_common_weights_need_no_other_encoder(weights: tuple[float, ...] | None) -> None:
    rows = [("w", rank, [1, 2, 3, 4 + rank], ViewState.LIVE, 0.1, TICK, "", None) for rank in range(2)]
    freshness = freshness_of(is_catching_up=False, outage=False)
    written, expected = both(namespace_of(rows), question_of(weights, is_peer=True), freshness)
    assert written == expected


def changed_later(change: Callable[[Namespaces, View], object]) -> tuple[bytes | None, bytes]:
    """Return both answers after a change of views that have been asked about before."""
    namespaces = Namespaces(IndexerSettings.ignoring_environment())
    for number in range(70):
        view = namespaces.add_view(StreamId("m", DEFAULT_TENANT, f"w{number}", 0), 16)
        fill(view, 3, 0)
    (namespace,) = namespaces.find("m", DEFAULT_TENANT)
    freshness, question = freshness_of(is_catching_up=False, outage=False), question_of(None, is_peer=True)
    before, _ = both(namespace, question, freshness)
    change(namespaces, view)
    written, expected = both(namespace, question, freshness)
    assert written != before
    return written, expected


def drop(namespaces: Namespaces, view: View) -> None:
    list(namespaces.forget(view.stream))


def rename(namespaces: Namespaces, view: View) -> None:
    drop(namespaces, view)
    fill(namespaces.add_view(view.stream._replace(worker="another"), 16), 2, 1)


def add_many(namespaces: Namespaces, _view: View) -> None:
    for number in range(100):
        fill(namespaces.add_view(StreamId("m", DEFAULT_TENANT, f"x{number}", 1), 16), 5, 1)


def hear(_namespaces: Namespaces, view: View) -> None:
    view.last_batch_tick, view.state = TICK, ViewState.LIVE


@pytest.mark.parametrize("change", [drop, rename, add_many, hear])
def test_changed_views_are_seen(change: Callable[[Namespaces, View], object]) -> None:
    written, expected = changed_later(change)
    assert written == expected


def test_another_namespace_of_the_same_model_is_not_mistaken_for_one_that_was_dropped() -> None:
    for worker in ("old", "new"):
        row = (worker, 0, [2, 2, 2, 2], ViewState.LIVE, 0.1, TICK, "", None)
        written, expected = both(
            namespace_of([row]), question_of(None, is_peer=True), freshness_of(is_catching_up=False, outage=False)
        )
        assert written == expected
        assert msgspec.json.decode(expected)["instances"].keys() == {worker}


@given(
    st.sampled_from([16, 64]),  # windows of more than 60 tokens are hashed in another way
    st.lists(st.tuples(st.none() | st.sampled_from(["salt", "pepper"]), st.booleans(), st.booleans())),
)
@settings(max_examples=num_examples(40))
def test_each_question_is_hashed_with_its_own_seed(block_size: int, asked: list[tuple[str | None, bool, bool]]) -> None:
    namespaces = Namespaces(IndexerSettings.ignoring_environment())
    writer, namespace = AnswerWriter(), namespaces.add_namespace("m", DEFAULT_TENANT, block_size)
    tokens, freshness = np.arange(200, dtype=np.uint32), freshness_of(is_catching_up=False, outage=False)
    for salt, is_bigram, is_peer in asked:
        question = ParsedQuery("m", DEFAULT_TENANT, "token_ids", None, salt, is_bigram, is_peer=is_peer)
        found = writer.find(question, prompt_of(question, tokens), namespace, freshness)
        assert found is not None
        assert found.hashes.tolist() == question.hashes(tokens, block_size).tolist()
