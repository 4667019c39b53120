"""EvictionQueue against a set that is sorted for every answer, under all policies."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_cache import EVICTION_POLICIES, CacheStateError, RadixKey
from engine_cache.tree.eviction import EvictionQueue, find_policy
from engine_cache.tree.node import TreeNode
from tests.support.effort import num_examples

POLICIES = sorted(EVICTION_POLICIES)
NUM_NODES = 12
NODE = st.integers(0, NUM_NODES - 1)


def make_nodes(clock, number):
    return [TreeNode(i, RadixKey([]), None, None, next(clock), i % 3) for i in range(number)]


class EvictionQueueMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy):
        self.policy = find_policy(policy)
        self.clock = count()
        self.nodes = make_nodes(self.clock, NUM_NODES)
        self.queue = EvictionQueue(self.policy)
        self.members = set()

    def first(self):
        return min(self.members, key=lambda node: (self.policy.key(node), node.id), default=None)

    @rule(position=NODE)
    def join(self, position):
        self.queue.add(self.nodes[position])
        self.members.add(self.nodes[position])

    @rule(position=NODE)
    def leave(self, position):
        self.queue.discard(self.nodes[position])
        self.members.discard(self.nodes[position])

    @rule(positions=st.lists(NODE, max_size=4), hit=st.booleans(), priority=st.integers(0, 4))
    def use(self, positions, hit, priority):
        """Touch the nodes of a path as a match or an insert does, candidates or not."""
        path = [self.nodes[position] for position in positions]
        for node in path:
            node.last_access_time = next(self.clock)
        self.queue.used(path)
        for node in path:  # a hit is counted later than the use
            node.priority = max(node.priority, priority)
            node.hit_count += hit

    @rule()
    def evict(self):
        first = self.first()
        assert self.queue.pop() is first
        self.members.discard(first)

    @precondition(lambda self: self.members)
    @rule(number=st.integers(1, NUM_NODES))
    def look_at_some_and_put_them_back(self, number):
        looked_at = []
        for _ in range(min(number, len(self.members))):
            looked_at.append(self.queue.pop())
        expected = sorted(self.members, key=lambda node: (self.policy.key(node), node.id))
        assert looked_at == expected[: len(looked_at)]
        for node in looked_at:
            self.queue.add(node)

    @invariant()
    def it_is_that_set(self):
        assert len(self.queue) == len(self.members)
        assert set(self.queue) == self.members
        assert all((node in self.queue) == (node in self.members) for node in self.nodes)
        self.queue.check()

    def teardown(self):
        for _ in range(len(getattr(self, "members", ()))):
            self.evict()


TestEvictionQueue = EvictionQueueMachine.TestCase
TestEvictionQueue.settings = settings(max_examples=num_examples(200), stateful_step_count=40)


@pytest.mark.parametrize("policy", POLICIES)
def test_coming_going_and_use_leave_nothing_behind(policy):
    clock = count()
    nodes, queue = make_nodes(clock, 3), EvictionQueue(find_policy(policy))
    for turn in range(10_000):
        queue.add(nodes[turn % 3])
        nodes[0].last_access_time = next(clock)
        queue.used(nodes)
        queue.discard(nodes[(turn + 1) % 3])
    assert len(queue._heap) + len(queue._unsorted) < 200


def test_check_finds_a_key_that_fell_unnoticed():
    (node, newest), queue = make_nodes(count(), 2), EvictionQueue(find_policy("mru"))
    queue.add(node)
    queue.add(newest)
    assert queue.pop() is newest
    node.last_access_time += 5
    with pytest.raises(CacheStateError, match=r"node 0: key \(-5, 0\) is below \(0, 0\)"):
        queue.check()


def test_check_finds_a_node_that_would_never_come_out():
    (node,), queue = make_nodes(count(), 1), EvictionQueue(find_policy("lru"))
    queue.add(node)
    queue._unsorted.clear()
    with pytest.raises(CacheStateError, match="node 0 may be evicted, but is not in the heap of 0"):
        queue.check()
