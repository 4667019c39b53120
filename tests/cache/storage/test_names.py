"""Names of pages: keys, prefixes, files, objects, and the pattern of all objects of one model and rank."""

import hashlib
import re
from dataclasses import replace

import pytest

from engine_cache.storage import PageLayout, PoolName, StorageIdentity, page_key, page_keys
from engine_cache.storage.object_names import PAGE_KEY_PATTERN

BLOCK = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
LAYOUT = PageLayout("bfloat16", 64, (32, 8, 128), "page_first")
PLAIN = StorageIdentity("org/model-7b", LAYOUT)
BARE = replace(PLAIN, use_fingerprint=False)
RANK = replace(BARE, tp_rank=3, tp_size=4)
STAGE = replace(RANK, pp_rank=1, pp_size=2)
MLA, MLA_STAGE = replace(RANK, is_mla=True), replace(STAGE, is_mla=True)
POOLS = {PoolName.KV: 2, PoolName.SWA: 2, PoolName.INDEXER: 1, PoolName.MAMBA: 3}
MLA_POOLS = POOLS | {PoolName.KV: 1, PoolName.SWA: 1}


def test_the_key_of_a_page_is_its_hash():
    assert page_key(BLOCK) == BLOCK
    assert page_key(BLOCK, "") == f"e3b0c44298fc1c14_{BLOCK}"


@pytest.mark.parametrize("extra_key", ["lora-7", "Mandant Süd", "a/../b"])
def test_the_namespace_goes_before_the_hash(extra_key):
    tag = hashlib.sha256(extra_key.encode()).hexdigest()[:16]
    assert page_keys([BLOCK, BLOCK[::-1]], extra_key) == [f"{tag}_{BLOCK}", f"{tag}_{BLOCK[::-1]}"]
    assert re.fullmatch(PAGE_KEY_PATTERN, page_key(BLOCK, extra_key))


@pytest.mark.parametrize("text", ["", "abc", BLOCK.upper(), BLOCK + "0", f"{BLOCK}\n", "../" + BLOCK[3:]])
def test_what_is_no_block_hash_is_refused(text):
    with pytest.raises(ValueError, match="block hash"):
        page_key(text)


@pytest.mark.parametrize(
    ("tag", "use_fingerprint", "prefix"),
    [(None, False, ""), ("blue", False, "blue_"), (None, True, "{}_"), ("blue", True, "blue_{}_")],
)
def test_tags_stand_before_the_key(tag, use_fingerprint, prefix):
    identity = replace(PLAIN, extra_backend_tag=tag, use_fingerprint=use_fingerprint)
    assert identity.prefix == prefix.format(identity.fingerprint)


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, model_name="org/model-8b"),
        *(
            replace(PLAIN, layout=replace(LAYOUT, **change))
            for change in (
                {"dtype": "float16"},
                {"page_size": 32},
                {"shape": (32, 4, 256)},
                {"host_layout": "layer_first"},
            )
        ),
    ],
)
def test_the_fingerprint_distinguishes_models_and_layouts(other):
    assert other.fingerprint != PLAIN.fingerprint


def test_the_fingerprint_is_the_same_in_every_process_and_for_every_rank():
    facts = (
        '["org/model-7b", {"dtype": "bfloat16", "host_layout": "page_first", "page_size": 64, "shape": [32, 8, 128]}]'
    )
    assert PLAIN.fingerprint == hashlib.sha256(facts.encode()).hexdigest()[:20]
    assert PLAIN.fingerprint == replace(PLAIN, tp_rank=1, tp_size=2).fingerprint


@pytest.mark.parametrize(
    ("change", "suffix"),
    [
        ({}, "_org-model-7b_0_1"),
        ({"tp_rank": 1, "tp_size": 4}, "_org-model-7b_1_4"),
        ({"is_mla": True, "tp_rank": 1, "tp_size": 4}, "_org-model-7b"),
        ({"pp_rank": 1, "pp_size": 2}, "_org-model-7b_0_1_2_1"),
        ({"is_mla": True, "pp_rank": 1, "pp_size": 2}, "_org-model-7b_2_1"),
        ({"model_name": "/models/org/m"}, "_-models-org-m_0_1"),
    ],
)
def test_files_end_with_model_and_rank(change, suffix):
    assert replace(PLAIN, **change).file_suffix == suffix


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_name", ""),
        ("model_name", "a\0b"),
        ("model_name", "m" * 81),
        ("extra_backend_tag", "a_b"),
        ("extra_backend_tag", "../x"),
        ("extra_backend_tag", ""),
        ("extra_backend_tag", "0123456789abcdef"),
        ("tp_rank", 1),
        ("pp_rank", -1),
    ],
)
def test_a_field_that_does_not_fit_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        replace(PLAIN, **{field: value})


# --- objects of a shared store ---


@pytest.mark.parametrize(
    ("identity", "pool", "names"),
    [
        (BARE, PoolName.KV, ["_0_k", "_0_v"]),
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
    [(BARE, PoolName.KV, 1), (MLA, PoolName.KV, 2), (BARE, PoolName.INDEXER, 2), (BARE, PoolName.MAMBA, 0)],
)
def test_pages_of_another_make_are_refused(identity, pool, num_runs):
    with pytest.raises(ValueError, match=f"runs of memory a page of pool {pool.value}: got {num_runs}"):
        identity.object_names(pool, num_runs)


def all_names(identity):
    pools = MLA_POOLS if identity.is_mla else POOLS
    ends = [end for pool, num_runs in pools.items() for end in identity.object_names(pool, num_runs)]
    return [f"{identity.prefix}{key}{end}" for key in (BLOCK, f"0123456789abcdef_{BLOCK}") for end in ends]


@pytest.mark.parametrize("tag", [None, "blue-1.5"])
@pytest.mark.parametrize("identity", [BARE, RANK, STAGE, MLA, MLA_STAGE])
def test_the_pattern_finds_all_names_of_a_rank_and_none_of_another(identity, tag):
    identity = replace(identity, extra_backend_tag=tag)
    assert all(re.fullmatch(identity.object_pattern, name) for name in all_names(identity))
    others = [replace(identity, extra_backend_tag="green"), replace(identity, use_fingerprint=True)]
    others += [replace(identity, extra_backend_tag="blue-1x5"), replace(identity, pp_rank=2, pp_size=3)]
    for other in others:
        assert not any(re.fullmatch(identity.object_pattern, name) for name in all_names(other))


def test_the_pattern_spares_what_other_ranks_do_not_share():
    of_rank_3 = [name for name in all_names(RANK) if "indexer" not in name]
    assert not any(re.fullmatch(BARE.object_pattern, name) for name in of_rank_3)
