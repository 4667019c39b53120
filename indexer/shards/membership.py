"""Follows a Kafka consumer group: who its members are, and which partitions each of them keeps.

The group protocol of Kafka carries both: each member tells its address when it joins, and the leader's assignment tells
every member the addresses and the partitions of all. Kafka itself sees an empty assignment, because the partitions are
read by explicit offsets: a rebalance therefore interrupts no reading.
"""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from aiokafka.errors import GroupAuthorizationFailedError, InconsistentGroupProtocolError, KafkaError

from indexer.shards.assignment import (
    NOBODY,
    Assignment,
    Candidate,
    decode_assignment,
    decode_candidate,
    encode,
    share_out,
)
from indexer.shards.settings import GroupSettings
from kv_events.kafka.connection import KafkaConnection, KafkaUnreachableError
from kv_events.kafka.private_parts import start_client, stop_client
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.outages import Outage
from kv_events.runtime.supervised import Backoff, in_background, keep_running
from kv_events.runtime.words import count

logger = logging.getLogger(__name__)

PROTOCOL = "kvsight"
_VERSION = 0
_POLL_MS = 500
_HEARTBEATS_PER_SESSION = 6
_CLOCK_S = 0.5
_METADATA_AGE_MS = 5000
"""Time after which added partitions are noticed."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 2.0
_REBALANCE_S = 10.0


class Membership:
    """One member of a group. Belongs to one event loop."""

    def __init__(self, settings: KafkaSettings, shards: GroupSettings, url: str) -> None:
        """url: address of this process, unless the settings name another one. Raises InvalidValueError for settings
        without a broker, or for a file that cannot be used.
        """
        group = shards.group or ""
        self.id = uuid.uuid4().hex
        """Tells this process from an earlier one at the same address."""
        self.url = shards.advertise_url or reachable(url, settings.kafka or "")
        self.group = group
        self.assignment = NOBODY
        """The newest one."""
        self.held: Collection[int] = ()
        """Partitions whose views this process keeps, as the consumer reports."""
        self.lent: frozenset[int] = frozenset()
        """Partitions that another member takes over and that this one keeps until that member has caught up."""
        self.outage = Outage(logger, f"consumer group {group} unusable", f"consumer group {group} usable")
        self._connection = KafkaConnection(settings)
        self._topic = settings.events_topic
        self._session_s = shards.group_session_s
        self._joined = asyncio.Event()
        self._awake_at = time.monotonic()
        self._uncertain_until = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    @property
    def is_assigned(self) -> bool:
        return self.assignment is not NOBODY

    @property
    def may_be_replaced(self) -> bool:
        """Whether this process stood still for so long that others may have its partitions by now.

        Until a new assignment, or until a heartbeat would have shown that it is no member any longer.
        """
        now = time.monotonic()
        return now < self._uncertain_until or now - self._awake_at > self._session_s

    @property
    def own(self) -> frozenset[int]:
        return self.assignment.partitions_of(self.id)

    @property
    def wanted(self) -> frozenset[int]:
        return self.own | self.lent

    async def wait(self, seconds: float) -> None:
        """Return after the first assignment, or after some time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._joined.wait(), seconds)

    def release(self, partitions: Collection[int]) -> None:
        """Stop keeping partitions whose new member has caught up."""
        self.lent -= frozenset(partitions)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be a member during a block. Leaving it leaves the group, so that the others take over at once."""
        clock = "consumer group clock"
        async with (
            in_background(keep_running(self._run, "consumer group", logger), "consumer group"),
            in_background(keep_running(self._watch_clock, clock, logger), clock),
        ):
            yield

    async def _watch_clock(self) -> None:
        while True:
            now = time.monotonic()
            if now - self._awake_at > self._session_s:
                self._uncertain_until = now + self._session_s / 2
                logger.warning("this process stood still for %.1f s", now - self._awake_at)
            self._awake_at = now
            await asyncio.sleep(_CLOCK_S)

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except (KafkaError, KafkaUnreachableError) as error:
                self.outage.note_failure(self._reason(error))
                await self._backoff.pause()

    async def _follow(self) -> None:
        await self._connection.check()
        consumer = self._connection.consumer(
            group_id=self.group,
            enable_auto_commit=False,
            partition_assignment_strategy=(_Assignor(self),),
            session_timeout_ms=round(self._session_s * 1000),
            heartbeat_interval_ms=round(self._session_s * 1000 / _HEARTBEATS_PER_SESSION),
            rebalance_timeout_ms=round(max(self._session_s, _REBALANCE_S) * 1000),
            metadata_max_age_ms=_METADATA_AGE_MS,
        )
        consumer.subscribe([self._topic])
        await start_client(consumer)
        try:
            while True:
                await consumer.getmany(timeout_ms=_POLL_MS)  # there are no records; raises errors of the group
                self.outage.note_success()
                self._backoff.reset()
        finally:
            await stop_client(consumer)

    def _reason(self, error: Exception) -> str:
        match error:
            case GroupAuthorizationFailedError():
                return f"{self._connection.user} may not use it: an ACL must allow Read on the group"
            case InconsistentGroupProtocolError():
                return "other software uses it; choose another name"
            case KafkaUnreachableError():
                return str(error)
            case _:
                return self._connection.failure(error, "read")

    def candidate(self) -> Candidate:
        return Candidate(self.id, self.url, self.assignment.generation, sorted(self.held))

    def adopt(self, assignment: Assignment) -> None:
        was_in_touch = assignment.before == self.assignment.generation and self.assignment.has(self.id)
        own = assignment.partitions_of(self.id)
        self.lent = frozenset(self.held) - own if was_in_touch and assignment.has(self.id) else frozenset()
        self.assignment = assignment
        self._uncertain_until, self._awake_at = 0.0, time.monotonic()
        self._joined.set()
        logger.info(
            "consumer group %s: %d of %d partitions, %s",
            self.group,
            len(own),
            len(assignment.owners()),
            count(len(assignment.members), "member"),
        )


def reachable(url: str, bootstrap: str) -> str:
    """Return an address under which other machines reach a server.

    A server that listens on all addresses is reached at the one from which this machine talks to Kafka. url: of the
    socket. bootstrap: addresses of brokers.
    """
    host = urlsplit(url).hostname or ""
    try:
        if not ip_address(host).is_unspecified:
            return url
        broker, _, port = bootstrap.partition(",")[0].rpartition(":")
        ((family, kind, *_, address), *_) = socket.getaddrinfo(broker.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except (OSError, ValueError):
        own = socket.gethostname()
    return f"{urlsplit(url).scheme}://{f'[{own}]' if ':' in own else own}:{urlsplit(url).port}"


class _Assignor(AbstractPartitionAssignor):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's view of a membership."""

    name = PROTOCOL

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        return ConsumerProtocolMemberMetadata(_VERSION, sorted(topics), encode(self._membership.candidate()))

    def assign(
        self, cluster: Any, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        """Share the partitions of each topic out among the members that read it. Only the leader is asked."""
        answers = dict.fromkeys(members, b"")
        now_ms = time.time_ns() // 1_000_000
        for topic in {topic for told in members.values() for topic in told.subscription}:
            readers = {name: told.user_data for name, told in members.items() if topic in told.subscription}
            candidates = {name: decode_candidate(told) for name, told in readers.items()}
            known = {name: candidate for name, candidate in candidates.items() if candidate is not None}
            shared = encode(share_out(known.values(), cluster.partitions_for_topic(topic) or (), now_ms))
            answers |= dict.fromkeys(known, shared)
        return {name: ConsumerProtocolMemberAssignment(_VERSION, [], answer) for name, answer in answers.items()}

    def on_assignment(self, assignment: ConsumerProtocolMemberAssignment) -> None:
        found = decode_assignment(assignment.user_data)
        if found is None:
            logger.warning("consumer group %s: an assignment of another version is ignored", self._membership.group)
        else:
            self._membership.adopt(found)
