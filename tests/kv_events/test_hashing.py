"""Golden vectors of SGLang's page hash and of the router's sequence hash, and independent implementations."""

import struct
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kv_events.errors import InvalidValueError
from kv_events.hash_seed import parse_seed
from kv_events.hashing import (
    block_hash_chain,
    hash_str_to_int64,
    hash_strs_to_int64,
    local_hashes,
    namespace_seed,
    namespaced_block_hashes,
    rolling_hashes,
    sequence_hashes,
    token_array,
)
from tests.support.engines.event_payloads import names_of
from tests.support.programs import run_program

V1 = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"


def chain(tokens: list[int], page_size: int, prior: str | None = None, *, is_bigram: bool = False) -> list[str]:
    return block_hash_chain(token_array(tokens), page_size, prior, is_bigram=is_bigram)


def hexes(values: np.ndarray) -> str:
    return " ".join(f"{value:016x}" for value in values.tolist())


@pytest.mark.parametrize(
    ("tokens", "page_size", "prior", "is_bigram", "names", "numbers"),
    [
        ([1, 2, 3, 4], 4, None, False, [V1], [-3488128144981237669]),
        (
            [5, 6, 7, 8, 9, 10, 11, 12],
            4,
            V1,
            False,
            [
                "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
                "eddb4ab93695109cc0853fa0167c53aa0dc373ece757e530a734981168bdeebc",
            ],
            [5674439469042975057, -1307369107475853156],
        ),
        (
            [1, 2, 3, 4, 5],
            2,
            None,
            True,
            [
                "ede8ef26a097f0fd889f9f39f6f5af921370630b164c4a4fa28eb716b2df9269",
                "678c5307f2a02a2aaf8edbeb80ebac13663f70e14a4fc8d5d62b77e702841e4b",
            ],
            [-1303529142941650691, 7461429976246528554],
        ),
        ([0, 128000, 2**32 - 1], 1, None, False, None, [-2360060374177730597, 7105422880840877247, 400498095865550854]),
        ([1, 2, 3, 4], 1, None, True, None, [3817746824117602890, 693609690625493819, 9012044230373971267]),
    ],
    ids=["plain", "behind a page", "of pairs", "of one token", "of one pair"],
)
def test_pages_have_sglangs_names_and_numbers(
    tokens: list[int], page_size: int, prior: str | None, is_bigram: bool, names: list[str] | None, numbers: list[int]
) -> None:
    found = chain(tokens, page_size, prior, is_bigram=is_bigram)
    assert names in (None, found)
    assert hash_strs_to_int64(found).tolist() == [*map(hash_str_to_int64, found)] == numbers


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.booleans(), st.sampled_from([None, V1]))
def test_chains_equal_hashlib_page_by_page(tokens: list[int], page: int, is_bigram: bool, prior: str | None) -> None:
    units = list(pairwise(tokens)) if is_bigram else [(t,) for t in tokens]
    expected, before = [], bytes.fromhex(prior or "")
    for start in range(0, len(units) - page + 1, page):
        data = b"".join(t.to_bytes(4, "little") for unit in units[start : start + page] for t in unit)
        before = sha256(before + data).digest()
        expected.append(before.hex())
    assert chain(tokens, page, prior, is_bigram=is_bigram) == expected


@pytest.mark.parametrize(("text", "value"), [("8" + "0" * 63, -(2**63)), ("7" + "f" * 63, 2**63 - 1), ("f" * 64, -1)])
def test_the_first_sixteen_digits_are_a_signed_number(text: str, value: int) -> None:
    assert hash_str_to_int64(text) == value
    assert hash_strs_to_int64([text, text]).tolist() == [value, value]


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.none() | st.text(max_size=20),
    st.none() | st.text(max_size=20),
)
def test_sglangs_namespaces_equal_hashlib_hash_by_hash(hashes: list[int], key: str | None, salt: str | None) -> None:
    parts = [
        b"\x00" if name is None else b"\x01" + struct.pack("<Q", len(name.encode())) + name.encode()
        for name in (key, salt)
    ]
    seed = sha256(b"sglang-kv-event-namespace-v1" + parts[0] + parts[1]).digest()
    expected = [struct.unpack(">q", sha256(seed + struct.pack(">q", value)).digest()[:8])[0] for value in hashes]
    if key is None and salt is None:
        expected = hashes
    assert namespaced_block_hashes(np.array(hashes, np.int64), key, salt).tolist() == expected


LOCAL = "cb38e4d7fb2dca5c e8d3ec39b907b74c 06b748f1777d599c 01e03482f18b34e9"
ROLLED = "cb38e4d7fb2dca5c 44a2b2379d6d3c3d aea1e67a6c80cf84 1aaa5eb6e2524a3b"
WIDE = [4294967295, 0, 65536, 128000] * 4


@pytest.mark.parametrize(
    ("tokens", "block_size", "base", "local", "rolled"),
    [
        (range(1, 5), 4, None, LOCAL[:16], ROLLED[:16]),
        (range(1, 17), 4, None, LOCAL, ROLLED),
        (range(1, 19), 4, None, LOCAL, ROLLED),
        (
            [0] * 16,
            4,
            None,
            " ".join(["b841d0df72b4a1b8"] * 4),
            "b841d0df72b4a1b8 4b776813cd05b409 10e6b813cf18c46a d7a0ee21df7e650c",
        ),
        (WIDE, 8, None, "31164fc098a32554 31164fc098a32554", "31164fc098a32554 51b908e0f68dbb77"),
        (
            range(1000, 1064),
            16,
            None,
            "f7e6c5a1896bad24 c7037f81c729e18c 71ec4d4fd981103e a74cbfb88382cd9f",
            "f7e6c5a1896bad24 3d5ff0dd2a93fd39 cf4f246cbcc8787b 0a0edb4669bfb130",
        ),
        (range(64), 64, None, "304d910e689e42bf", "304d910e689e42bf"),
        (
            range(1, 17),
            4,
            0,
            "6fc1ebd4f4d6ea31 c03f64119f038920 a7bef1c3b3535717 18d010773424bf58",
            "6fc1ebd4f4d6ea31 3a14937fd5340c7a 829711b6d52f08eb 94f88a95a0ef86fd",
        ),
        (WIDE, 8, 0, "27a5c60b5317679a 27a5c60b5317679a", "27a5c60b5317679a 904445bfa7a0481e"),
    ],
)
def test_sequence_hashes_are_the_peers(
    tokens: Sequence[int], block_size: int, base: int | None, local: str, rolled: str
) -> None:
    prompt = token_array(list(tokens))
    assert hexes(local_hashes(prompt, block_size, base)) == local
    assert hexes(sequence_hashes(prompt, block_size, base=base)) == rolled


@pytest.mark.parametrize(
    ("lora", "salt", "base", "is_bigram", "rolled"),
    [
        ("ad", None, None, False, "e31f2294523cac4f eb2c6b61d4a338a2 432b7808e84f8854 3a2b86e7e7b7d2b2"),
        (None, "x", None, False, "32d40e0b05e9f0ae 05d862d48240e605 6deec741e09c9e65 592ad9bd00ffaeb5"),
        ("ad", "x", None, False, "a98797fcbcfd72b9 efd42beead0df276 6fbafb47f7775924 f825316cbb67c828"),
        ("", "", None, False, ROLLED),
        ("ad", None, 0, False, "78fa26c08f9cf853 abf211aab165471a 0a35924fb84bda54 8fd665c3593c1de2"),
        ("ad", None, None, True, "4586fb9fd299bc31 1f73643d4dad2c96 e1c5a568eba5e8ca 10ff6f6e9f072b51"),
    ],
)
def test_lora_and_salt_enter_the_local_hashes_and_pages_are_rolled_with_the_base(
    lora: str | None, salt: str | None, base: int | None, is_bigram: bool, rolled: str
) -> None:
    prompt, seed = token_array(list(range(1, 17 + is_bigram))), namespace_seed(lora, salt, base=base)
    assert hexes(sequence_hashes(prompt, 4, seed, base=base, is_bigram=is_bigram)) == rolled
    assert hexes(rolling_hashes(local_hashes(prompt, 4, seed, is_bigram=is_bigram), base=base)) == rolled


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=70),
    st.integers(1, 9),
    st.none() | st.text(max_size=5),
    st.none() | st.text(max_size=5),
    st.booleans(),
)
def test_hashes_of_any_namespace_equal_the_xxhash_package(
    tokens: list[int], block_size: int, lora: str | None, salt: str | None, is_bigram: bool
) -> None:
    names = sequence_hashes(token_array(tokens), block_size, namespace_seed(lora, salt), is_bigram=is_bigram)
    assert names.tolist() == names_of(tokens, block_size, lora=lora, salt=salt, is_bigram=is_bigram)


@pytest.mark.parametrize("width", [*range(1, 72), 100, 127, 128, 255, 256, 257, 272, 273, 512, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1337, 2**64 - 1])
def test_every_length_class_equals_the_xxhash_package(width: int, seed: int) -> None:
    tokens = np.random.default_rng(width).integers(0, 2**32, 3 * width, dtype=np.uint32)
    expected = [xxhash.xxh3_64_intdigest(tokens[i * width :][:width].tobytes(), seed=seed) for i in range(3)]
    assert local_hashes(tokens, width, seed).tolist() == expected


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 2**64 - 1), st.booleans())
def test_rolling_equals_the_xxhash_package(local: list[int], base: int, with_parent: bool) -> None:
    parent = 12345 if with_parent else None
    expected, before = [], parent
    for value in local:
        before = (
            value
            if before is None
            else xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + value.to_bytes(8, "little"), seed=base)
        )
        expected.append(before)
    assert rolling_hashes(np.array(local, np.uint64), parent=parent, base=base).tolist() == expected


def test_a_prompt_can_be_hashed_in_two_parts() -> None:
    prompt, of_adapter = token_array(list(range(64))), namespace_seed("ad")
    whole = sequence_hashes(prompt, 4, of_adapter)
    rest = sequence_hashes(prompt[32:], 4, of_adapter, parent=int(whole[7]))
    assert whole[8:].tolist() == rest.tolist()


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, 1.5, "7", None])
def test_a_token_outside_u32_is_refused_with_its_position(bad: object) -> None:
    with pytest.raises(InvalidValueError, match=r"token_ids\[2\]"):
        token_array([1, 2, bad])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 3, 4], (1, 2, 3, 4), np.arange(1, 5), np.arange(1, 9, dtype=np.uint32)[::2] // 2 + 1, range(1, 5)],
    ids=["list", "tuple", "int64", "strided", "range"],
)
def test_a_prompt_may_be_any_sequence_of_integers(prompt: Sequence[int]) -> None:
    expected = sequence_hashes(np.array(list(prompt), np.uint32), 2)
    assert sequence_hashes(prompt, 2).tolist() == expected.tolist()
    local = local_hashes(prompt, 2)
    assert rolling_hashes(local.tolist()).tolist() == rolling_hashes(tuple(local)).tolist() == expected.tolist()
    assert block_hash_chain(prompt, 2, None, is_bigram=False) == chain(list(prompt), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sequence_hashes([1, -2], 2), r"tokens\[1\]: got -2, expected an integer in 0 .. 4294967295"),
        (lambda: sequence_hashes(np.zeros(4), 2), "tokens: got .*, expected a flat list of integers"),  # type: ignore[arg-type]
        (lambda: sequence_hashes("12", 2), "tokens: got '12', expected a flat list of integers"),  # type: ignore[arg-type]
        (lambda: sequence_hashes(b"12345678", 2), "tokens: got b'12345678', expected a flat list of integers"),
        (lambda: sequence_hashes(None, 2), "tokens: got None, expected a flat list of integers"),  # type: ignore[arg-type]
        (lambda: local_hashes([1], 0), "block_size: got 0, expected a positive integer"),
        (lambda: sequence_hashes([1], "2"), "block_size: got '2', expected a positive integer"),  # type: ignore[arg-type]
        (lambda: sequence_hashes([1], 2, -1), "seed: got -1, expected an integer in 0"),
        (lambda: sequence_hashes([1], 2, parent=2**64), "parent: got 18446744073709551616, expected an integer in 0"),
        (lambda: rolling_hashes([1, -1]), r"local\[1\]: got -1, expected an integer in 0"),
        (lambda: rolling_hashes(np.array([1, -1])), r"local\[1\]: got -1, expected an integer in 0"),
        (lambda: namespace_seed("\ud800"), r"lora_name: got '\\ud800', expected text that UTF-8 can hold"),
        (lambda: namespace_seed(base=-1), "base: got -1, expected an integer in 0"),
        (lambda: block_hash_chain([1], 0, None, is_bigram=False), "page_size: got 0, expected a positive integer"),
        (lambda: block_hash_chain([1], 1, "zz", is_bigram=False), "prior_hash: got 'zz', expected hex digits"),
        (lambda: hash_str_to_int64("zz"), "hash_str: got 'zz', expected hex digits"),
        (lambda: hash_strs_to_int64(["ab"]), "hash_strs: got .*, expected hashes of 64 hex digits"),
    ],
)
def test_a_bad_argument_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        call()


# --- the seed of a process ------------------------------------------------------------------------------------------

# The hashes that each part of a process computes for the prompt 1 to 16 in pages of 4, in hex.
_EVERY_PART = """
import numpy as np
from tests.rigs.bridge import Rig
from tests.support.engines.event_payloads import stored
from api.queries.body_formats import format_of
from api.queries.parsing import BY_ANY, decode_question
from engine_cache import InsertParams, RadixCache, RadixKey
from kv_events import BlockStored
from kvsight import sequence_hashes
from kv_events.hashing import namespace_seed, token_array
from publisher.event_columns import derived_columns

tokens = list(range(1, 17))
json = b'{"model_name": "m", "token_ids": %s, "cache_salt": "%s"}'
for salt in ("", "x"):
    cache = RadixCache(page_size=4, enable_kv_cache_events=True)
    cache.insert(InsertParams(RadixKey(tokens, salt), np.arange(16)))
    stores = [event for event in cache.take_events() if isinstance(event, BlockStored)]
    of_cache = np.frombuffer(b"".join(event.sequence_hashes for event in stores), "<u8").tolist()
    of_publisher = derived_columns(BlockStored([1, 2, 3, 4], None, tokens, 4, extra_key=salt), 4, None).hashes.tolist()
    bridged = {name for _, name in Rig().take(stored([1, 2, 3, 4], tokens, cache_salt=salt), form="map").pages}
    of_bridge = sorted(bridged, key=of_cache.index)
    body = json % (str(tokens).encode(), salt.encode())
    question, numbers = decode_question(body, format_of("application/json"), BY_ANY)
    of_api = question.hashes(numbers, 4).tolist()
    of_library = sequence_hashes(token_array(tokens), 4, namespace_seed(cache_salt=salt)).tolist()
    for hashes in (of_cache, of_publisher, of_bridge, of_api, of_library):
        print(*(f"{value:016x}" for value in hashes))
"""
SALTED = "32d40e0b05e9f0ae 05d862d48240e605 6deec741e09c9e65 592ad9bd00ffaeb5"
OF_SEED_0 = "6fc1ebd4f4d6ea31 3a14937fd5340c7a 829711b6d52f08eb 94f88a95a0ef86fd"
SALTED_OF_SEED_0 = "e341f4d2fb03746f 0bdd9c770866656d c91139e7cedf106b 1576fc081fbb043e"


@pytest.mark.parametrize(
    ("variables", "plain", "salted"),
    [({}, ROLLED, SALTED), ({"KVSIGHT_HASH_SEED": "0"}, OF_SEED_0, SALTED_OF_SEED_0)],
    ids=["by default", "0"],
)
def test_caches_publishers_bridges_and_the_api_use_the_same_seed(
    variables: dict[str, str], plain: str, salted: str
) -> None:
    done = run_program(_EVERY_PART, **variables)
    assert done.stdout.splitlines() == [plain] * 5 + [salted] * 5, done.stderr


_STARTS = """
from publisher.settings import PublisherSettings
from api.settings import ApiSettings
for settings in (lambda: PublisherSettings(model="m", worker="w", block_size=4), ApiSettings):
    try:
        settings()
    except ValueError as error:
        print(error)
"""


def test_a_bad_seed_stops_the_start_and_is_named() -> None:
    lines = run_program(_STARTS, KVSIGHT_HASH_SEED="secret?").stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("KVSIGHT_HASH_SEED: got 'secret?', expected dynamo, or a number") for line in lines)


@pytest.mark.parametrize("text", ["", "-1", "18446744073709551616", "1.0", "0x539", "Dynamo", "१", "9" * 5000])
def test_a_seed_is_a_name_or_a_number_of_64_bits(text: str) -> None:
    assert [*map(parse_seed, ("dynamo", "0", "18446744073709551615"))] == [1337, 0, 2**64 - 1]
    with pytest.raises(InvalidValueError, match="--seed: got"):
        parse_seed(text, "--seed")
