"""Messages that wait while earlier ones are applied: their order, their bound, and which go first beyond it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Self

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from bridge.counters import BridgeCounters
from bridge.stream import messages as module
from bridge.stream.messages import Backlog, Inboxes, receiving

BOUND = 10_000


class Rig:
    """Two sockets within the process, and the backlog of the one that receives."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], inboxes: Inboxes) -> None:
        self._receiver, self._sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        address = f"inproc://{id(self)}"
        self._receiver.bind(address)
        self._sender.connect(address)
        self.counters = BridgeCounters()
        self._inboxes = inboxes
        self.backlog = Backlog(inboxes, zmq.asyncio.Socket.shadow(self._receiver), self.counters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._receiver.close(linger=0)
        self._sender.close(linger=0)

    def add(self, first: int, payloads: Sequence[bytes]) -> None:
        """Send messages with ascending numbers, and add them."""
        for seq, payload in enumerate(payloads, first):
            self._sender.send_multipart((b"topic", seq.to_bytes(8, "big"), payload))
        with self._inboxes.one() as inbox:
            inbox.receive(self._receiver, with_topics=True)
            self.backlog.add(inbox)

    def taken(self) -> list[tuple[str, int, bytes]]:
        """Take everything."""
        found = []
        while self.backlog:
            for sent in self.backlog.take():
                batches = map(sent.messages.one, range(len(sent.messages)))
                found += [(sent.topic, seq, bytes(payload)) for seq, payload in batches]
        return found


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as own:
        yield own


@given(st.lists(st.lists(st.binary(max_size=3000), min_size=1, max_size=5), max_size=12))
def test_the_newest_messages_that_fit_are_kept_in_order(
    context: zmq.Context[zmq.Socket[bytes]], passes: list[list[bytes]]
) -> None:
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        patched.setattr(module, "_MAX_BYTES", BOUND)
        inboxes = Inboxes()
        rig = stack.enter_context(Rig(context, inboxes))
        sent: list[tuple[str, int, bytes]] = []
        for payloads in passes:
            rig.add(len(sent), payloads)
            sent += [("topic", len(sent) + number, payload) for number, payload in enumerate(payloads)]
            assert inboxes.backlog_bytes <= max(BOUND, sum(map(len, payloads)) + 64 * len(payloads))
        kept = rig.taken()
        assert kept == sent[len(sent) - len(kept) :]
        assert rig.counters.dropped_batches == len(sent) - len(kept)
        assert inboxes.backlog_bytes == 0
        if sum(len(payload) + 64 for _, _, payload in sent) <= BOUND:
            assert len(kept) == len(sent)


def test_all_backlogs_together_have_a_bound_and_each_keeps_its_newest_messages(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_FLEET_BYTES", BOUND)
    inboxes = Inboxes()
    with Rig(context, inboxes) as first, Rig(context, inboxes) as second:
        for rig in (first, second):
            for number in range(4):
                rig.add(number, [bytes(2000)])
        assert [seq for _, seq, _ in first.taken()] == [0, 1, 2, 3]
        assert [seq for _, seq, _ in second.taken()] == [3]
        second.add(9, [b"x"])
        second.backlog.clear()
    assert inboxes.backlog_bytes == 0


async def test_what_arrives_is_received_for_as_long_as_the_block_waits() -> None:
    calls: list[bool] = []
    enough = asyncio.Event()

    def receive() -> None:
        calls.append(True)
        if len(calls) == 3:
            enough.set()

    with receiving(receive):
        await asyncio.wait_for(enough.wait(), 20)
    num_calls = len(calls)
    with receiving(lambda: None):
        await asyncio.sleep(0)
    assert len(calls) == num_calls
