"""Names of the objects of a page, and the pattern that finds all objects of one model and rank."""

import re
from dataclasses import replace

import pytest

from engine_cache.storage import PageLayout, PoolName, StorageIdentity

KEY = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
PLAIN = StorageIdentity("org/model", PageLayout("bfloat16", 64, (32, 8, 128), "page_first"), use_fingerprint=False)
RANK = replace(PLAIN, tp_rank=3, tp_size=4)
STAGE = replace(RANK, pp_rank=1, pp_size=2)
MLA, MLA_STAGE = replace(RANK, is_mla=True), replace(STAGE, is_mla=True)
POOLS = {PoolName.KV: 2, PoolName.SWA: 2, PoolName.INDEXER: 1, PoolName.MAMBA: 3}
MLA_POOLS = POOLS | {PoolName.KV: 1, PoolName.SWA: 1}


@pytest.mark.parametrize(
    ("identity", "pool", "names"),
    [
        (PLAIN, PoolName.KV, ["_0_k", "_0_v"]),
        (RANK, PoolName.KV, ["_3_k", "_3_v"]),
        (STAGE, PoolName.KV, ["_3_1_k", "_3_1_v"]),
        (MLA, PoolName.KV, ["__k"]),
        (MLA_STAGE, PoolName.KV, ["_1_k"]),
        (RANK, PoolName.INDEXER, ["__indexer"]),
        (MLA_STAGE, PoolName.INDEXER, ["_1_indexer"]),
        (RANK, PoolName.MAMBA, ["_3_temporal", "_3_conv_0", "_3_conv_1"]),
        (MLA_STAGE, PoolName.MAMBA, ["_3_1_temporal", "_3_1_conv_0", "_3_1_conv_1"]),
        (RANK, PoolName.SWA, ["_3_swa_k", "_3_swa_v"]),
        (MLA, PoolName.SWA, ["__swa"]),
    ],
)
def test_every_object_of_a_page_has_a_name(identity, pool, names):
    assert identity.object_names(pool, len(names)) == names


@pytest.mark.parametrize(
    ("identity", "pool", "num_runs"),
    [(PLAIN, PoolName.KV, 1), (MLA, PoolName.KV, 2), (PLAIN, PoolName.INDEXER, 2), (PLAIN, PoolName.MAMBA, 0)],
)
def test_pages_of_another_make_are_refused(identity, pool, num_runs):
    with pytest.raises(ValueError, match=f"runs of memory a page of pool {pool.value}: got {num_runs}"):
        identity.object_names(pool, num_runs)


def all_names(identity):
    pools = MLA_POOLS if identity.is_mla else POOLS
    ends = [end for pool, num_runs in pools.items() for end in identity.object_names(pool, num_runs)]
    return [f"{identity.prefix}{key}{end}" for key in (KEY, f"0123456789abcdef_{KEY}") for end in ends]


@pytest.mark.parametrize("tag", [None, "blue-1.5"])
@pytest.mark.parametrize("identity", [PLAIN, RANK, STAGE, MLA, MLA_STAGE])
def test_the_pattern_finds_all_names_of_a_rank_and_none_of_another(identity, tag):
    identity = replace(identity, extra_backend_tag=tag)
    assert all(re.fullmatch(identity.object_pattern, name) for name in all_names(identity))
    others = [replace(identity, extra_backend_tag="green"), replace(identity, use_fingerprint=True)]
    others += [replace(identity, extra_backend_tag="blue-1x5"), replace(identity, pp_rank=2, pp_size=3)]
    for other in others:
        assert not any(re.fullmatch(identity.object_pattern, name) for name in all_names(other))


def test_the_pattern_spares_what_other_ranks_do_not_share():
    of_rank_3 = [name for name in all_names(RANK) if "indexer" not in name]
    assert not any(re.fullmatch(PLAIN.object_pattern, name) for name in of_rank_3)
