"""The hash seed of a deployment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_events.errors import InvalidValueError
from kv_events.hash_seed import parse_seed

ROOT = Path(__file__).resolve().parents[3]

# The hashes that each part of a process computes for the prompt 1 to 16 in pages of 4, in hex.
_EVERY_PART = """
import numpy as np
from tests.support.bridge.rig import Rig
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
# without a salt, with the salt "x"
WITH_1337 = (
    "cb38e4d7fb2dca5c 44a2b2379d6d3c3d aea1e67a6c80cf84 1aaa5eb6e2524a3b",
    "32d40e0b05e9f0ae 05d862d48240e605 6deec741e09c9e65 592ad9bd00ffaeb5",
)
WITH_SEED_0 = (
    "6fc1ebd4f4d6ea31 3a14937fd5340c7a 829711b6d52f08eb 94f88a95a0ef86fd",
    "e341f4d2fb03746f 0bdd9c770866656d c91139e7cedf106b 1576fc081fbb043e",
)


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVSIGHT_")} | variables
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, WITH_1337),
        ({"KVSIGHT_HASH_SEED": "dynamo"}, WITH_1337),
        ({"KVSIGHT_HASH_SEED": "0"}, WITH_SEED_0),
    ],
)
def test_caches_publishers_bridges_and_the_api_use_the_same_seed(
    variables: dict[str, str], expected: tuple[str, str]
) -> None:
    done = run(_EVERY_PART, PYTHONPATH=str(ROOT), **variables)
    plain, salted = expected
    assert done.stdout.splitlines() == [plain] * 5 + [salted] * 5, done.stderr


def test_a_bad_seed_stops_the_start_and_is_named() -> None:
    for settings in (
        "publisher.settings.PublisherSettings(model='m', worker='w', block_size=4)",
        "api.settings.ApiSettings()",
    ):
        done = run(f"import publisher.settings, api.settings; {settings}", KVSIGHT_HASH_SEED="secret?")
        assert "KVSIGHT_HASH_SEED: got 'secret?', expected dynamo, or a number" in done.stderr


@pytest.mark.parametrize(("text", "seed"), [("dynamo", 1337), ("0", 0), ("18446744073709551615", 2**64 - 1)])
def test_a_seed_is_a_name_or_a_number_of_64_bits(text: str, seed: int) -> None:
    assert parse_seed(text) == seed


@pytest.mark.parametrize("text", ["", "-1", "18446744073709551616", "1.0", "0x539", "Dynamo", "१", "9" * 5000])
def test_anything_else_is_none(text: str) -> None:
    with pytest.raises(InvalidValueError, match="--seed: got"):
        parse_seed(text, "--seed")
