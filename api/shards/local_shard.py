"""Replies of a member from its own views."""

import numpy as np

from api.queries.encoding import age_ms
from api.shards.wire import (
    ANY_BLOCK_SIZE,
    MAX_BLOCK_SIZES,
    MAX_NAMES,
    PromptRows,
    ShardPrompt,
    ShardReply,
    ShardRequest,
    StreamRow,
)
from indexer.consumer import Consumer
from indexer.namespaces import Namespace
from indexer.scores import stream_scores
from indexer.shards.owned_partitions import OwnedPartitions
from indexer.slices import Slices
from indexer.views import STATES

_NUMBERS = {state: number for number, state in enumerate(STATES)}
_HASH = np.dtype("<u8")


class LocalShard:
    """The views of one member. Belongs to the event loop of its consumer."""

    def __init__(self, consumer: Consumer, owned: OwnedPartitions) -> None:
        self._consumer = consumer
        self._owned = owned

    def owned(self) -> dict[int, bool]:
        """Return the partitions of this member, and whether their views are up to date."""
        return self._owned.owned()

    async def reply(self, asked: ShardRequest) -> ShardReply:
        """Answer another member. Other tasks run about once a millisecond."""
        found, slices = [], Slices()
        for prompt in asked.prompts:
            found.append(self._find(prompt))
            await slices.yield_if_due()
        return self._reply(asked, found)

    def reply_inline(self, asked: ShardRequest) -> ShardReply:
        """Answer another member, while no other task runs."""
        return self._reply(asked, list(map(self._find, asked.prompts)))

    def _reply(self, asked: ShardRequest, found: list[PromptRows]) -> ShardReply:
        membership = self._owned.membership
        newest = membership.assignment
        return ShardReply(
            membership.id,
            newest.generation,
            self._owned.owned(),
            found,
            newest if newest.generation > asked.generation else None,
        )

    def _find(self, prompt: ShardPrompt) -> PromptRows:
        namespaces = self._consumer.namespaces.find(prompt.model, prompt.tenant)
        if not namespaces:
            return PromptRows([], [], self._known())
        rows: list[StreamRow] = []
        for namespace in namespaces:
            packed = prompt.hashes.get(namespace.key.block_size, prompt.hashes.get(ANY_BLOCK_SIZE))
            if packed is not None:
                rows += self._rows(namespace, packed, prompt.num_positions)
        block_sizes = [namespace.key.block_size for namespace in namespaces]
        return PromptRows(block_sizes[:MAX_BLOCK_SIZES], rows, [])

    def _rows(self, namespace: Namespace, packed: bytes, num_positions: int | None) -> list[StreamRow]:
        consumer = self._consumer
        hashes, now = np.frombuffer(packed, _HASH), consumer.now()
        return [
            StreamRow(
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
        return sorted({each.key[:2] for each in namespaces if not namespaces.is_group(each)})[:MAX_NAMES]
