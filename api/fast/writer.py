"""Answers written by a kernel. They equal the encoded structs byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from weakref import finalize, ref

import msgspec
import numpy as np

from api.fast.kernels.answer import (
    AGE,
    BYTES_PER_RANK,
    BYTES_PER_WORKER,
    CPU,
    DISK,
    EXTERNAL,
    GPU,
    RANKS,
    STATE,
    Layout,
    StreamTable,
)
from api.fast.kernels.connections import SocketBuffers, answer_requests
from api.fast.kernels.query import (
    IN_ARRAY,
    LOCAL_HASHES,
    SEQUENCE_HASHES,
    TOKENS,
    Given,
    QueryBuffers,
    Seeds,
    Times,
    answer_query,
)
from api.fast.kernels.text import MARGIN, Texts
from api.queries.answers import hint_of
from indexer.freshness import Freshness
from indexer.kernels.find import PageLookup
from indexer.namespaces import KeptGroups, Namespace
from indexer.scores import groups_of
from indexer.views import STATES
from kv_events.hashing import process_base
from kv_events.http.parsed_query import ParsedQuery, PromptArray
from kv_events.http.queries import PeerInstance, RfcInstance
from kv_events.kernels.bundles import pin
from kv_events.kernels.xxh3 import long_hash_state
from kv_events.limits import MAX_HASHES_PER_QUERY, MAX_TOKENS_PER_QUERY
from selection.roster import Found

_UINT8 = np.dtype(np.uint8)

_PEER_BEGIN = b'{"scores":{'
_FRAME_BYTES = 256
UNITS = {
    "token_ids": TOKENS,
    "block_hashes": LOCAL_HASHES,
    "seq_hashes": SEQUENCE_HASHES,
    "block_hash": SEQUENCE_HASHES,
}
"""What the numbers of a prompt are, by field."""
_NO_TOKENS, _NO_HASHES = np.zeros(0, np.uint32), np.zeros(0, np.uint64)


class GivenPrompt(NamedTuple):
    """How `answer_query` gets a prompt: its parameters."""

    given: Given
    text: bytes = b""
    start: int = 0
    stop: int = 0
    tokens: PromptArray = _NO_TOKENS
    hashes: PromptArray = _NO_HASHES


# Layouts of answers are taken from the structs that describe them: fixed texts, and gaps for these numbers.
_TOKENS = {GPU: 1000001, CPU: 1000002, DISK: 1000003, EXTERNAL: 1000004}
_AGE_MS, _RANK, _RANK_TOKENS, _STATE = 1000005, 1000006, 1000007, "?"
_GAPS = {str(tokens).encode(): tier for tier, tokens in _TOKENS.items()} | {
    str(_AGE_MS).encode(): AGE,
    b'"%d":%d' % (_RANK, _RANK_TOKENS): RANKS,
    _STATE.encode(): STATE,
}
_GAP = re.compile(b"|".join(re.escape(gap) for gap in sorted(_GAPS, key=len, reverse=True)))


def texts(pieces: Iterable[bytes]) -> Texts:
    """Join pieces of text."""
    held = list(pieces)
    data = np.frombuffer(bytearray(b"".join(held).ljust(sum(map(len, held)) + MARGIN)), np.uint8)
    return Texts(data, np.cumsum([0, *map(len, held)], dtype=np.int64))


def layout_of(instance: PeerInstance | RfcInstance) -> Layout:
    """Return the layout of a dialect. instance: one whose values are those of `_GAPS`."""
    text = b":" + msgspec.json.encode(instance).removesuffix(b"}")
    has_scores = np.array([isinstance(instance, PeerInstance)])
    gaps = np.array([_GAPS[gap] for gap in _GAP.findall(text)], np.uint8)
    return Layout(texts(_GAP.split(text)[:-1]), gaps, texts(state.value.encode() for state in STATES), has_scores)


_SHARED = {"longest_matched": _TOKENS[EXTERNAL], "gpu": _TOKENS[GPU], "cpu": _TOKENS[CPU]}
_SHARED |= {"disk": _TOKENS[EXTERNAL], "external": _TOKENS[EXTERNAL], "age_ms": _AGE_MS}
PEER = layout_of(PeerInstance(**_SHARED, dp={_RANK: _RANK_TOKENS}, state=_STATE))  # type: ignore[arg-type]
RFC = layout_of(RfcInstance(**_SHARED, dp={_RANK: _RANK_TOKENS}, state=_STATE))  # type: ignore[arg-type]


def prompt_of(question: ParsedQuery, numbers: PromptArray) -> GivenPrompt:
    """Return a prompt whose numbers are in an array."""
    given = UNITS[question.field], IN_ARRAY
    return GivenPrompt(given, tokens=numbers) if given[0] == TOKENS else GivenPrompt(given, hashes=numbers)


class AnswerWriter:
    """Answers queries about one namespace, all its workers included. One thread calls it."""

    def __init__(self) -> None:
        self._peer, self._rfc = pin(PEER), pin(RFC)
        self._tables: dict[int, _KeptTable] = {}  # by the id of a namespace, while it exists
        self._buffers = QueryBuffers.new()
        self._pinned = pin(self._buffers)
        self._plan: Plan | None = None

    def write(
        self, question: ParsedQuery, prompt: GivenPrompt, namespace: Namespace, freshness: Freshness, now: float
    ) -> bytes | None:
        """Return the answer as JSON. now: seconds since 1970.

        None: a text must be read in another way, or a number of the answer needs the general encoder.
        """
        times = (now, *freshness.bounds())
        length, num_positions = self.plan(question, namespace).answer(prompt, times, finds_only=False)
        if length < 0:
            return None
        answer, block_size = self._buffers.out[:length].tobytes(), namespace.key.block_size
        if question.is_peer and prompt.given[0] == TOKENS and num_positions < block_size:
            hint = msgspec.json.encode(hint_of(question, num_positions, [block_size]))
            answer = b'%b,"hint":%b}' % (answer[:-1], hint)
        return answer

    def find(
        self, question: ParsedQuery, prompt: GivenPrompt, namespace: Namespace, freshness: Freshness
    ) -> Found | None:
        """Return what each stream can reuse. The arrays are valid until the next call.

        None: a text must be read in another way.
        """
        times = (0.0, *freshness.bounds())
        num_found, num_positions = self.plan(question, namespace).answer(prompt, times, finds_only=True)
        if num_positions < 0:
            return None
        buffers, given, block_size = self._buffers, prompt.given, namespace.key.block_size
        if given[0] == TOKENS:
            num_pages, num_tokens = num_positions // block_size, num_positions + question.is_bigram
        else:
            num_pages, num_tokens = num_positions, num_positions * block_size
        hashes = prompt.hashes if given == (SEQUENCE_HASHES, IN_ARRAY) else buffers.hashes[:num_pages]
        return Found(hashes, num_tokens, buffers.streams[:num_found], buffers.pages)

    def plan(self, question: ParsedQuery, namespace: Namespace) -> Plan:
        """Return how this question is answered now. It is kept: those that follow often differ in their seed alone."""
        plan = self._plan
        if plan is None or not plan.is_for(question, namespace):
            plan = self._planned(question, namespace)
        elif (question.lora_name, question.cache_salt) == (plan.question.lora_name, plan.question.cache_salt):
            return plan
        state = long_hash_state(plan.numbers[0] + question.is_bigram, question.seed)
        self._buffers.long_state[: len(state)] = state
        self._plan = plan._replace(question=question, seeds=(question.seed, plan.seeds[1]))
        return self._plan

    def _planned(self, question: ParsedQuery, namespace: Namespace) -> Plan:
        table = self._roster(namespace)
        begin = _PEER_BEGIN if question.is_peer else b"{%s:{" % msgspec.json.encode(question.tenant)
        block_size = namespace.key.block_size
        num_pages = max(MAX_HASHES_PER_QUERY, MAX_TOKENS_PER_QUERY // block_size)
        num_bytes = len(begin) + table.most_bytes
        buffers = self._buffers.with_room(num_pages, namespace.index.most_streams, num_bytes)
        if buffers is not self._buffers:
            self._buffers, self._pinned = buffers, pin(buffers)
        buffers.out[: len(begin)] = np.frombuffer(begin, _UINT8)
        if question.weights is not None:
            buffers.weights[:] = question.weights
        return Plan(
            question,
            ref(namespace),
            namespace.num_changes,
            table.groups,
            namespace.index.lookup,
            self._pinned,
            table.table,
            self._peer if question.is_peer else self._rfc,
            (block_size, int(question.is_bigram), int(question.weights is not None), len(begin)),
            (question.seed, process_base()),
            num_bytes,
        )

    def _roster(self, namespace: Namespace) -> _KeptTable:
        kept = self._tables.get(id(namespace))
        if kept is None or kept.num_changes != namespace.num_changes or kept.groups is not groups_of(namespace):
            if kept is None:
                finalize(namespace, self._forget, id(namespace))
            kept = self._tables[id(namespace)] = _KeptTable.of(namespace)
        return kept

    def _forget(self, namespace: int) -> None:
        """Release the memory of a namespace that is gone. namespace: its id."""
        self._tables.pop(namespace)
        if self._plan is not None and self._plan.namespace() is None:
            self._plan = None


class Plan(NamedTuple):
    """All that the answer to a question needs, except the prompt and the time."""

    question: ParsedQuery
    namespace: ref[Namespace]
    num_changes: int
    """`Namespace.num_changes`."""
    groups: KeptGroups
    lookup: PageLookup
    buffers: QueryBuffers
    table: StreamTable
    layout: Layout
    numbers: tuple[int, int, int, int]
    """Block size, 1 for pages of token pairs, 1 if there are weights, bytes of the beginning."""
    seeds: Seeds
    answer_bytes: int
    """Bound on the size of an answer."""

    def is_for(self, question: ParsedQuery, namespace: Namespace) -> bool:
        """Return whether the plan would be the same now, but for the question and its seed."""
        mine = self.question
        return (
            self.namespace() is namespace
            and namespace.num_changes == self.num_changes
            and groups_of(namespace) is self.groups
            and namespace.index.lookup is self.lookup
            and question.tenant == mine.tenant
            and question.is_peer == mine.is_peer
            and question.is_bigram == mine.is_bigram
            and question.weights == mine.weights
        )

    def answer(self, prompt: GivenPrompt, times: Times, *, finds_only: bool) -> tuple[int, int]:
        """Call `answer_query`."""
        given, text, start, stop, tokens, hashes = prompt
        block_size, is_bigram, has_weights, begin = self.numbers
        question = (given, block_size, is_bigram, has_weights, int(finds_only), begin)
        query = question, self.seeds, self.lookup, self.buffers, self.table, self.layout, times
        return answer_query(text, start, stop, tokens, hashes, *query)


class DirectQueries(NamedTuple):
    """How requests of direct connections are answered: those that ask the same about different prompts."""

    plan: Plan
    given: Given

    @property
    def answer_bytes(self) -> int:
        """See `Plan`."""
        return self.plan.answer_bytes

    def answer_requests(self, sockets: SocketBuffers, count: int, head_size: int, times: Times) -> int:
        """Call the kernel of this name."""
        plan, sizes = self.plan, (count, head_size, self.plan.answer_bytes)
        query = plan.numbers, plan.seeds, plan.lookup, plan.buffers, plan.table, plan.layout, times
        return answer_requests(sockets, sizes, self.given, *query)


class _KeptTable(NamedTuple):
    """The table of a namespace until its views are others."""

    table: StreamTable
    num_changes: int
    """`Namespace.num_changes`."""
    groups: KeptGroups
    most_bytes: int
    """Bound on the text about all workers."""

    @classmethod
    def of(cls, namespace: Namespace) -> _KeptTable:
        columns, size, groups = namespace.columns, namespace.index.most_streams, groups_of(namespace)
        workers, ranks, following = (np.full(size, -1, np.int32) for _ in range(3))
        numbers: dict[str, int] = {}
        last: dict[str, int] = {}
        for stream, view in sorted(namespace.views.items()):
            worker = view.stream.worker
            workers[stream] = numbers.setdefault(worker, len(numbers))
            ranks[stream] = view.stream.dp_rank
            if worker in last:
                following[last[worker]] = stream
            last[worker] = stream
        names = texts(map(msgspec.json.encode, numbers))
        table = StreamTable(
            states=columns.states,
            faults=columns.faults,
            last_batch_at=columns.last_batch_at,
            last_batch_tick=columns.last_batch_tick,
            workers=workers,
            ranks=ranks,
            following=following,
            names=names,
            shown=np.zeros(size, np.uint8),
            found_in=np.zeros(size, np.int64),
            written_in=np.zeros(len(numbers), np.int64),
            query=np.zeros(1, np.int64),
            groups=groups.groups,
        )
        text_bytes = BYTES_PER_WORKER * len(numbers) + BYTES_PER_RANK * len(namespace.views)
        return cls(pin(table), namespace.num_changes, groups, 2 * len(names.data) + text_bytes + _FRAME_BYTES)
