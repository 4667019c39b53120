"""Every medium string that released engines send."""

from __future__ import annotations

import pytest

from bridge.decoding.events import tier_of
from bridge.decoding.kernels.columns import UNKNOWN

GPU, CPU, DISK, EXTERNAL = range(4)
SEEN = {
    GPU: ["", "GPU", "gpu", "device(type='cuda', index=0)"],
    CPU: ["CPU", "CPU_PINNED", "CPU_TIER1", "cpu"],
    DISK: ["CPU_TIER2", "NVME", "DISK", "FS", "OBJ", "STORAGE", "disk"],
    EXTERNAL: ["EXTERNAL", "REMOTE"],
}


@pytest.mark.parametrize(("medium", "tier"), [(medium, tier) for tier, media in SEEN.items() for medium in media])
def test_a_medium_is_its_tier(medium: str, tier: int) -> None:
    assert tier_of(medium) == tier_of(medium, "LOCAL") == tier
    assert tier_of(medium, "REMOTE") == EXTERNAL


@pytest.mark.parametrize("medium", ["SSD", "NPU", "GPU2", " GPU", "device(type='cpu')"])
def test_an_unknown_medium_is_no_tier(medium: str) -> None:
    assert tier_of(medium) == tier_of(medium, "REMOTE") == UNKNOWN
