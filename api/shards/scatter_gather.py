"""Asks all members of a group, and joins their replies into the answer that a single service would give.

`LocalShard` replies from a member's own views.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from api.http_pool import NoAnswerError
from api.problems import ProblemError, ProblemKind
from api.queries.answers import Answered, age_ms, check_block_size, encode_answer, hint_of, unknown_model
from api.shards import wire
from indexer.consumer import Consumer
from indexer.namespaces import Namespace
from indexer.scores import StreamScore, TierTokens, stream_scores, worker_scores
from indexer.shards.assignment import Assignment
from indexer.shards.membership import Membership
from indexer.shards.owned_partitions import OwnedPartitions
from indexer.slices import Slices
from indexer.views import STATES, ViewState
from kv_events.http.parsed_query import ParsedQuery, PromptArray
from kv_events.http.queries import Missing
from kv_events.http.service import ShardMember, Shards
from kv_events.runtime.supervised import in_background, keep_running

logger = logging.getLogger(__name__)

_WATCH_S = 0.5
_MAX_MODELS = 4096
_MANY_TOKENS = 2**17
_CATCHING_UP = "catching up with the log"
_NOBODY = "no member answers for it yet"
_NUMBERS = {state: number for number, state in enumerate(STATES)}


class LocalShard:
    """The views of one member. Belongs to the event loop of its consumer."""

    def __init__(self, consumer: Consumer, owned: OwnedPartitions) -> None:
        self._consumer = consumer
        self._owned = owned

    def owned(self) -> dict[int, bool]:
        """Return the partitions of this member, and whether their views are up to date."""
        return self._owned.owned()

    async def reply(self, asked: wire.ShardRequest) -> wire.ShardReply:
        """Answer another member. Other tasks run about once a millisecond."""
        found, slices = [], Slices()
        for prompt in asked.prompts:
            found.append(self._find(prompt))
            await slices.yield_if_due()
        return self._reply(asked, found)

    def reply_inline(self, asked: wire.ShardRequest) -> wire.ShardReply:
        """Answer another member, while no other task runs."""
        return self._reply(asked, list(map(self._find, asked.prompts)))

    def _reply(self, asked: wire.ShardRequest, found: list[wire.PromptRows]) -> wire.ShardReply:
        membership = self._owned.membership
        newest = membership.assignment
        return wire.ShardReply(
            membership.id,
            newest.generation,
            self._owned.owned(),
            found,
            newest if newest.generation > asked.generation else None,
        )

    def _find(self, prompt: wire.ShardPrompt) -> wire.PromptRows:
        namespaces = self._consumer.namespaces.find(prompt.model, prompt.tenant)
        if not namespaces:
            return wire.PromptRows([], [], self._known())
        rows: list[wire.StreamRow] = []
        for namespace in namespaces:
            packed = prompt.hashes.get(namespace.key.block_size, prompt.hashes.get(wire.ANY_BLOCK_SIZE))
            if packed is not None:
                rows += self._rows(namespace, packed, prompt.num_positions)
        block_sizes = [namespace.key.block_size for namespace in namespaces]
        return wire.PromptRows(block_sizes[: wire.MAX_BLOCK_SIZES], rows, [])

    def _rows(self, namespace: Namespace, packed: bytes, num_positions: int | None) -> list[wire.StreamRow]:
        consumer = self._consumer
        hashes, now = np.frombuffer(packed, "<u8"), consumer.now()
        return [
            wire.StreamRow(
                each.partition,
                each.worker,
                each.dp_rank,
                *each.tiers,
                _NUMBERS[each.state],
                age_ms(each.last_batch_at, now),
            )
            for each in stream_scores(namespace, hashes, consumer.freshness, num_positions)
        ]

    def _known(self) -> list[tuple[str, str]]:
        namespaces = self._consumer.namespaces
        return sorted({each.key[:2] for each in namespaces if not namespaces.is_group(each)})[: wire.MAX_NAMES]


@dataclass
class _Prompt:
    question: ParsedQuery
    numbers: PromptArray
    hashes: dict[int, bytes]
    """Those of the next round, see `ShardPrompt`."""
    block_sizes: set[int]
    """Those that the workers of the model use."""
    known: set[tuple[str, str]]
    streams: list[StreamScore]

    def to_send(self) -> wire.ShardPrompt:
        question = self.question
        return wire.ShardPrompt(question.model, question.tenant, self.hashes, question.num_positions(self.numbers))


class _Winner(NamedTuple):
    """Whose rows of a partition count."""

    is_ready: bool
    is_owner: bool
    place: int
    """Of the member in the list of those who answered."""


class ScatterGather:
    """The `Answerer` of a member of a group. Belongs to the event loop of the consumer."""

    def __init__(self, own: LocalShard, membership: Membership, peers: wire.Members) -> None:
        self._own = own
        self._membership = membership
        self._peers = peers
        self._since: dict[int, float] = {}  # missing partition -> seconds since 1970
        self._block_sizes: OrderedDict[tuple[str, str], set[int]] = OrderedDict()  # by model and tenant
        self.missing: list[Missing] = []
        """What answers lack at the moment."""
        self.given_up = 0
        """Answers of other members that did not come."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the other members in the background of a block."""
        try:
            async with in_background(keep_running(self._watch, "shards", logger), "shards"):
                yield
        finally:
            await self._peers.close()

    def shards(self) -> Shards:
        """Return the state of the group as this member sees it."""
        membership = self._membership
        assignment = membership.assignment
        return Shards(
            membership.group,
            membership.id,
            assignment.generation,
            [ShardMember(each.id, each.url, each.partitions) for each in assignment.members],
            self._own.owned(),
            sorted(membership.lent),
            self.missing,
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            replies, failures = await self._ask([], has_patience=True)
            self.missing = self._select_rows(replies, failures)[-1]
            self._release(replies)

    def _release(self, replies: Sequence[wire.ShardReply]) -> None:
        """Stop keeping the partitions that their new member answers for."""
        lent = self._membership.lent
        if lent:
            owned = self._membership.assignment.owners()
            ready = {(p, each.member) for each in replies for p, is_ready in each.claims.items() if is_ready}
            self._membership.release([p for p in lent if p in owned and (p, owned[p].id) in ready])

    def check_ready(self) -> None:
        """Raise ProblemError (503) before the first assignment, when nobody to ask is known."""
        if not self._membership.is_assigned:
            raise not_joined(self._membership.group)

    async def answer(self, questions: Sequence[tuple[ParsedQuery, PromptArray]]) -> Answered:
        """See `Answerer`."""
        prompts = [await self._prompt(*each) for each in questions]
        missing = await self._round(prompts)
        again = [prompt for prompt in prompts if prompt.hashes]
        if again:  # workers use block sizes that were not known here
            missing = await self._round(again)
        self.missing = missing
        return [self._answer(prompt, missing) for prompt in prompts], missing

    def knows(self, question: ParsedQuery) -> bool:
        """See `Answerer`. A model is known once its workers have been seen."""
        return (question.model, question.tenant) in self._block_sizes

    async def _prompt(self, question: ParsedQuery, numbers: PromptArray) -> _Prompt:
        prompt = _Prompt(question, numbers, {}, set(), set(), [])
        if question.field != "token_ids":
            size = wire.ANY_BLOCK_SIZE if question.block_size is None else question.block_size
            prompt.hashes[size] = _packed(question.hashes(numbers, 0))
        elif question.block_size is not None:
            await self._hash(prompt, [question.block_size])
        else:
            await self._hash(prompt, self._block_sizes.get((question.model, question.tenant), ()))
        return prompt

    async def _hash(self, prompt: _Prompt, block_sizes: Iterable[int]) -> None:
        for size in block_sizes:
            if len(prompt.numbers) > _MANY_TOKENS:
                hashes = await asyncio.to_thread(prompt.question.hashes, prompt.numbers, size)
            else:
                hashes = prompt.question.hashes(prompt.numbers, size)
            prompt.hashes[size] = _packed(hashes)

    async def _round(self, prompts: Sequence[_Prompt]) -> list[Missing]:
        """Ask all members once. Afterwards a prompt has hashes only for block sizes that must be asked for again."""
        asked = [each.to_send() for each in prompts]
        accepted, winners, missing = self._select_rows(*await self._ask(asked))
        for number, prompt in enumerate(prompts):
            known_sizes, prompt.hashes = prompt.hashes.keys(), {}
            for place, reply in enumerate(accepted):
                found = reply.found[number]
                prompt.block_sizes.update(found.block_sizes)
                prompt.known.update(found.known)
                prompt.streams += _streams(found, winners, place)
            question = prompt.question
            if prompt.block_sizes:
                self._remember(question, prompt.block_sizes)
            if question.field == "token_ids" and question.block_size is None:
                await self._hash(prompt, sorted(prompt.block_sizes - known_sizes))
        return missing

    def _remember(self, question: ParsedQuery, block_sizes: set[int]) -> None:
        model = question.model, question.tenant
        self._block_sizes[model] = block_sizes
        self._block_sizes.move_to_end(model)
        if len(self._block_sizes) > _MAX_MODELS:
            self._block_sizes.popitem(last=False)

    def _answer(self, prompt: _Prompt, missing: list[Missing]) -> bytes | ProblemError:
        question = prompt.question
        if not prompt.block_sizes and not self.knows(question):
            return unknown_model(question, prompt.known, _in_words(missing) if missing else "")
        if prompt.block_sizes and not missing:
            try:
                check_block_size(question, prompt.block_sizes)
            except ProblemError as problem:
                return problem
        now = time.time()
        scores = worker_scores(each._replace(last_batch_at=now - each.last_batch_at / 1000) for each in prompt.streams)
        hint = hint_of(question, question.num_positions(prompt.numbers), prompt.block_sizes)
        return encode_answer(question, scores, now, hint, missing or UNSET)

    async def _ask(
        self, prompts: list[wire.ShardPrompt], *, has_patience: bool = False
    ) -> tuple[list[wire.ShardReply], dict[str, str]]:
        """Ask all members, this one first. Returns the answers, and member -> why it did not answer.

        has_patience: also ask those that did not answer the last time.
        """
        has_patience = has_patience or self._membership.may_be_replaced  # another member knows who has its partitions
        assignment = self._membership.assignment
        request = wire.ShardRequest(assignment.generation, prompts)
        others = self._peers.of(assignment.members)
        body = wire.encode(request) if others else b""
        failures = {each.member.id: each.failure for each in others if each.failure and not has_patience}
        asked = [each for each in others if each.member.id not in failures]
        asking = [asyncio.create_task(each.ask(body)) for each in asked]
        replies = [await self._own.reply(request)]
        for other, reply in zip(asked, await asyncio.gather(*asking, return_exceptions=True), strict=True):
            if isinstance(reply, NoAnswerError):
                failures[other.member.id] = str(reply)
                self.given_up += 1
            elif isinstance(reply, BaseException):
                raise reply
            elif len(reply.found) == len(prompts):
                replies.append(reply)
            else:
                failures[other.member.id] = "its answer cannot be read"
        return replies, failures

    def _select_rows(
        self, replies: Sequence[wire.ShardReply], failures: dict[str, str]
    ) -> tuple[list[wire.ShardReply], dict[int, _Winner], list[Missing]]:
        """Decide whose rows count, by the newest assignment that anybody knows."""
        newest = max(
            (self._membership.assignment, *(each.assignment for each in replies if each.assignment is not None)),
            key=lambda assignment: assignment.generation,
        )
        accepted = [each for each in replies if newest.has(each.member)]
        owners = newest.owners()
        winners: dict[int, _Winner] = {}
        for place, each in enumerate(accepted):
            for partition, is_ready in each.claims.items():
                owner = owners.get(partition)
                claim = _Winner(is_ready, owner is not None and owner.id == each.member, place)
                if partition not in winners or claim[:2] > winners[partition][:2]:
                    winners[partition] = claim
        return accepted, winners, self._missing(newest, winners, failures)

    def _missing(self, newest: Assignment, winners: dict[int, _Winner], failures: dict[str, str]) -> list[Missing]:
        lacking: dict[tuple[str, str], list[int]] = {}
        for partition, owner in newest.owners().items():
            winner = winners.get(partition)
            if winner is None or not winner.is_ready:
                reason = failures.get(owner.id) or (_NOBODY if winner is None else _CATCHING_UP)
                lacking.setdefault((owner.url, reason), []).append(partition)
        gone = {partition for partitions in lacking.values() for partition in partitions}
        now = time.time()
        self._since = {partition: self._since.get(partition, now) for partition in gone}
        return [
            Missing(sorted(partitions), min(self._since[p] for p in partitions), url, reason)
            for (url, reason), partitions in sorted(lacking.items())
        ]


def not_joined(group: str) -> ProblemError:
    """Return the problem of a request that comes before the first assignment."""
    detail = f"this service has not joined the consumer group {group} yet, see /ready"
    return ProblemError(503, ProblemKind.UNAVAILABLE, detail, retry_after_s=1)


def _packed(hashes: PromptArray) -> bytes:
    return np.ascontiguousarray(hashes, "<u8").tobytes()


def _streams(found: wire.PromptRows, winners: dict[int, _Winner], place: int) -> list[StreamScore]:
    """Return the rows that count. `last_batch_at` is the age in milliseconds here."""
    streams = []
    for row in found.rows:
        winner = winners.get(row.partition)
        if winner is None or winner.place != place:
            continue
        state = STATES[row.state]
        if state is ViewState.LIVE and not winner.is_ready:
            state = ViewState.SYNCING
        tiers = TierTokens(row.gpu, row.cpu, row.disk, row.external)
        streams.append(StreamScore(row.worker, row.dp_rank, tiers, state, row.age_ms, row.partition))
    return streams


def _in_words(missing: Sequence[Missing]) -> str:
    partitions = sorted(p for each in missing for p in each.partitions)
    return f"partitions {', '.join(map(str, partitions[:20]))} are missing: {missing[0].reason}"
