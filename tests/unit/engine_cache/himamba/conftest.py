import pytest

from tests.support.caches.hybrid_rig import HybridRig
from tests.support.caches.hybrid_steps import tombstone_and_leaf


@pytest.fixture
def rig():
    rig = HybridRig()
    assert rig.events() == [("AllBlocksCleared", None, None)]
    yield rig
    rig.check()


@pytest.fixture
def full_host(rig):
    """A rig whose host has no free page."""
    rig.host.alloc(rig.host.size)
    yield rig
    rig.host.clear()


@pytest.fixture
def late(rig):
    """[1, 2] on both tiers, without a state, above [3, 4] with one."""
    upper, _ = tombstone_and_leaf(rig)
    return upper


@pytest.fixture
def in_flight(rig, late):
    """The same, with a backup of the state of [1, 2] in flight."""
    rig.insert([1, 2])
    assert late.mamba_host_value is not None
    return late
